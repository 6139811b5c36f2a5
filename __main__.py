"""`perdure` and `python -m perdure`."""

from .cli.app import main

if __name__ == "__main__":
    main()
