"""Every error of perdure, flat under one base. Each builds its message from its data and survives pickle."""

from __future__ import annotations


class PerdureError(Exception):
    """Base of all errors that a user may meet. `str(error)` says what happened and what to do next."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class UsageError(PerdureError):
    """The caller asked for something impossible: a bad reference, data set, database or option."""


class NotFound(UsageError):
    """No such run in this store."""


class StoreUnavailable(PerdureError):
    """The database could not be written within the bounded retries; nothing of the request was applied, or it
    is unknown whether it was. Every command may be sent again."""


class SchemaMismatch(UsageError):
    """The database was written by another version of perdure and was left untouched."""


class LeaseHeld(UsageError):
    """Another supervisor works on this store."""


class CorruptLog(PerdureError):
    """A stored event cannot be read, or a run's log has a gap."""


class IllegalTransition(PerdureError):
    """An event that the state table does not allow in the present state."""

    def __init__(self, status: str, event: str, why: str = "") -> None:
        super().__init__(f"event {event!r} is not allowed in state {status!r}" + (f": {why}" if why else ""))
        self.status, self.event, self.why = status, event, why

    def __reduce__(self) -> tuple[type[IllegalTransition], tuple[str, str, str]]:
        return type(self), (self.status, self.event, self.why)
