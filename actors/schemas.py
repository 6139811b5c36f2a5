"""JSON schemas of others: those of MCP servers, and those to which arguments that people edit are held. Nothing that
they refer to is fetched from anywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from ..store.errors import UsageError

MESSAGE_MAX: Final = 500
"""Characters of what is said of a value; a message quotes the value."""


def violation(schema: Mapping[str, Any], value: Any) -> str:
    """What is wrong with a value by a JSON schema; empty if nothing is. Raises UsageError for a schema that cannot be
    applied."""
    from jsonschema.exceptions import UnknownType, best_match
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        error = best_match(_validator(schema)(schema, registry=Registry()).iter_errors(value))
    except (UnknownType, Unresolvable, re.error) as error:
        raise UsageError(f"the tool's schema cannot be applied: {str(error).splitlines()[0]}") from error
    if error is None:
        return ""
    where = ".".join(str(part) for part in error.absolute_path)
    return f"{where}: {error.message[:MESSAGE_MAX]}" if where else error.message[:MESSAGE_MAX]


def broken(schema: Any) -> str:
    """Why something is no schema of a tool's arguments; empty if it is one."""
    from jsonschema.exceptions import SchemaError

    if not isinstance(schema, dict) or schema.get("type") != "object":
        return "it is of no object"
    try:
        _validator(schema).check_schema(schema)
    except SchemaError as error:
        return str(error.message)[:MESSAGE_MAX]
    return ""


def _validator(schema: Mapping[str, Any]) -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for

    return validator_for(schema, default=Draft202012Validator)
