"""One call of a method, answered as a service would answer it; stored worlds and the yardstick share it."""

import copy
import inspect
import json
from typing import Any


def invoke(instance: Any, method: str, arguments: dict[str, Any]) -> Any:
    """The result as a JSON value; an exception becomes an error answer, and what changed before it stays changed.

    Defaults are copied first: `post_tweet` stores its default list in the tweet and `mention` extends it, which in a
    process that serves many runs would leak from one run into the next. A result with values that JSON lacks becomes
    text, as in the package's own executor.
    """
    function = getattr(instance, method)
    try:
        bound = inspect.signature(function).bind(**arguments)
        bound.apply_defaults()
        bound.arguments = copy.deepcopy(bound.arguments)
        result = function(*bound.args, **bound.kwargs)
    except Exception as error:  # noqa: BLE001
        return {"error": f"Error during execution: {error}"}
    try:
        return json.loads(json.dumps(result))
    except TypeError:
        return str(result)
