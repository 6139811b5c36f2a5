"""`python -m perdure`, and the `perdure` command."""

from __future__ import annotations

import os
import signal
from typing import Final

INTERRUPTED: Final = 130


def main() -> None:
    """The entry point. Ctrl-C while the command is still being imported ends it as later on, without a traceback."""
    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeds:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from .cli.app import main as command

    try:
        if heeds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command()
    except KeyboardInterrupt:  # in between
        os._exit(INTERRUPTED)
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED:  # one more would now end the process before it has told its exit code
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise


if __name__ == "__main__":
    main()
