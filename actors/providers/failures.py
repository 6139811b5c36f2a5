"""What it means for a run that a provider did not answer: a passing trouble, or an end with a name of its own."""

from __future__ import annotations

from typing import Final

from pydantic_ai.exceptions import (
    ModelAPIError,
    ModelAuthenticationError,
    ModelConnectionError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelNotFoundError,
    ModelQuotaExceededError,
    ModelRateLimitError,
    ModelRequestRejectedError,
    ModelRequestTimeout,
    ModelServerError,
    ModelUnavailableError,
)

from ..model import ModelError
from .pace import Passing

TOO_LARGE: Final = 413
BROKEN_STREAM: Final = "the stream ended before the answer did"
ADVICE: Final = {
    "bad_key": "check the key and what it may use, then resume",
    "no_credit": "top up the account, then resume",
    "context_too_long": "the conversation does not fit: a new run with a shorter task, or a model with more room",
    "unknown_model": "check the model's name and the base URL",
    "rejected": "the provider does not take this request",
    "unavailable": "resume the run later",
}
"""What to do, by the code that the run fails with."""
ENDS: Final[tuple[tuple[type[ModelAPIError], str], ...]] = (
    (ModelQuotaExceededError, "no_credit"),
    (ModelAuthenticationError, "bad_key"),
    (ModelContextWindowExceededError, "context_too_long"),
    (ModelNotFoundError, "unknown_model"),
    (ModelRequestRejectedError, "rejected"),
)
PASSES: Final = (
    ModelRateLimitError,
    ModelUnavailableError,
    ModelServerError,
    ModelConnectionError,
    ModelRequestTimeout,
)
LIMITS: Final = (ModelRateLimitError, ModelUnavailableError)
"""Troubles of the provider with all that it is asked, not with one request."""


def failure(error: ModelAPIError, provider: str) -> Passing | ModelError:
    """What to raise for an error of the provider's. An error body in an answer that began well is like any other; one
    that nobody knows passes, for all that can be said."""
    for kind, code in ENDS:
        if isinstance(error, kind):
            return named(code, provider, error)
    status = error.status_code if isinstance(error, ModelHTTPError) else None
    if status == TOO_LARGE:
        return named("context_too_long", provider, error)
    if isinstance(error, PASSES) or status in (None, 408, 409, 425, 200):
        return Passing(named("unavailable", provider, error), isinstance(error, LIMITS), error.retry_after)
    return named("rejected", provider, error)


def named(code: str, provider: str, error: Exception | str) -> ModelError:
    """An end of the run under this code."""
    return ModelError(f"{provider}: {_what(error)}; {ADVICE[code]}", code)


def _what(error: Exception | str) -> str:
    """The provider's own words, in one line."""
    body = getattr(error, "body", None)
    inner = body.get("error", body) if isinstance(body, dict) else None
    said = inner.get("message") if isinstance(inner, dict) else None
    status = getattr(error, "status_code", None)
    text = said if isinstance(said, str) and said else getattr(error, "message", None) or str(error)
    return " ".join(f"{status} {text}".split() if status else text.split())[:500]
