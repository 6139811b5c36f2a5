"""A small MCP server over standard streams that also misbehaves, with nothing but the standard library.

MODE is plain; banner: prints what is no message; mute: never answers; crash: ends at once; deaf LOCK: ends at nothing,
and holds a lock on a file. What its tools do: see `act`.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DO: dict[str, Any] = {
    "type": "object",
    "properties": {"do": {"type": "string"}, "dir": {"type": "string"}},
    "required": ["do"],
}
TOOLS: list[dict[str, Any]] = [
    {"name": "look", "description": "Look.", "inputSchema": DO, "annotations": {"readOnlyHint": True}},
    {"name": "put", "inputSchema": DO, "annotations": {"idempotentHint": True, "readOnlyHint": False}},
    {"name": "act", "inputSchema": DO, "annotations": {"destructiveHint": False}},
    {"name": "odd/name.v2", "inputSchema": DO},
    {"name": "x" * 90 + "1", "inputSchema": DO},
    {"name": "x" * 90 + "2", "inputSchema": DO},
]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def text(what: str, **more: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": what}], **more}


def act(name: str, arguments: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
    """Take effect, which a line in the ledger tells, and do something."""
    do = arguments["do"]
    if "dir" in arguments:
        with open(Path(arguments["dir"], "ledger"), "a") as file:
            file.write(f"effect,{name},{do},{os.getpid()}\n")
    match do:
        case "die":
            print("the disk is full", file=sys.stderr, flush=True)
            os._exit(7)
        case "hang":
            subprocess.Popen(["sleep", "600"], start_new_session=True)
            subprocess.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 &"], check=True)
            Path(arguments["dir"], "hangs").touch()
            time.sleep(600)
        case "fail":
            return text("there is no order 17", isError=True)
        case "refuse":
            raise ValueError("no such thing")
        case "image":
            return {"content": [{"type": "image", "data": PIXEL, "mimeType": "image/png"}]}
        case "resource":
            resource = {"uri": "file:///a.txt", "mimeType": "text/plain", "text": "the file"}
            return {"content": [{"type": "text", "text": "see"}, {"type": "resource", "resource": resource}]}
        case "structured":
            return {"content": [], "structuredContent": {"id": 9007199254740993}}
        case "nothing":
            return {"content": []}
        case "much":
            return text("begin" + "x" * 2_000_000 + "end")
        case "key":
            return text(meta["perdure/idempotencyKey"])
        case "leak":
            return text(os.environ["SHOP_API_KEY"])
        case "env":
            return text(" ".join(sorted(os.environ)))
        case "price":
            return text(arguments["price"])
        case "half":
            return text("half \ud83d an emoji")
        case "junk":
            return {"content": "junk"}
    return text(f"{name} {do}")


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    params = asked.get("params") or {}
    match asked["method"]:
        case "initialize":
            about = {"name": "fake", "version": "1"}
            version = params["protocolVersion"]
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
        case "tools/list":
            start = int(params.get("cursor") or 0)
            more = {"nextCursor": str(start + 4)} if start + 4 < len(TOOLS) else {}
            return {"tools": TOOLS[start : start + 4], **more}
        case "tools/call":
            return act(params["name"], params["arguments"], params.get("_meta") or {})
        case other:
            raise ValueError(f"no method {other}")


def main(mode: str, lock: str = "") -> None:
    if mode == "crash":
        sys.exit("no such database")
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        held = os.open(lock, os.O_RDWR | os.O_CREAT)
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if mode == "banner":
        print("Welcome!\n" + "a line of a log\n" * 70_000 + '{"json": "but no message"}', flush=True)
    for line in sys.stdin:
        asked = json.loads(line, parse_float=str)
        if mode == "mute" or "id" not in asked:
            continue
        try:
            said = {"result": answer(asked)}
        except ValueError as error:
            said = {"error": {"code": -32000, "message": str(error)}}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **said}), flush=True)
    if mode == "deaf":
        time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
