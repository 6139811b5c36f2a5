"""Ordinary Python objects as canonical JSON text, so that two worlds can be compared across processes.

Stricter than the package's own comparison, which looks at public attributes: private ones (working directory, caches,
the state of random generators) count too, and so does which objects are shared. Numbers compare as in Python, 5 == 5.0.
Only datetime attributes are left out: they are readings of the clock, and no two executions agree on those.
"""

import hashlib
import json
import random
from datetime import datetime
from typing import Any


def canonical(value: Any) -> str:
    """The text of a value; equal texts mean equal values. Raises TypeError for an object it has no rule for."""
    return json.dumps(_plain(value, {}), ensure_ascii=False, separators=(",", ":"))


def _plain(value: Any, seen: dict[int, int]) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, random.Random):
        return {"$random": hashlib.sha256(repr(value.getstate()).encode()).hexdigest()}
    if id(value) in seen:
        return {"$same_as": seen[id(value)]}
    seen[id(value)] = len(seen)
    return _compound(value, seen)


def _compound(value: Any, seen: dict[int, int]) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item, seen) for item in value]
    if isinstance(value, set | frozenset):
        return {"$set": sorted((_plain(item, seen) for item in value), key=repr)}
    if isinstance(value, dict):  # order is kept, since listings show it; pairs, since keys may be numbers
        return {"$dict": [[_plain(key, seen), _plain(item, seen)] for key, item in value.items()]}
    if hasattr(value, "__dict__"):
        attributes = {
            key: _plain(item, seen) for key, item in sorted(vars(value).items()) if not isinstance(item, datetime)
        }
        return {"$object": type(value).__name__, **attributes}
    raise TypeError(f"no canonical text for {type(value).__name__}")
