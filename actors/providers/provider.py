"""One provider as a run asks it: a request becomes a stream, and what came of it an answer or a named failure."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic_ai.direct import model_request, model_request_stream
from pydantic_ai.exceptions import ModelAPIError, UnexpectedModelBehavior, UserError
from pydantic_ai.messages import (
    ModelResponse,
    ModelResponseStreamEvent,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    ThinkingPart,
    ThinkingPartDelta,
    ToolCallPart,
    ToolCallPartDelta,
)
from pydantic_ai.models import Model as ProviderModel
from pydantic_ai.models import create_async_httpx2_client, infer_model, parse_model_id
from pydantic_ai.providers import infer_provider, infer_provider_class

from ...store.errors import UsageError
from ...store.events import Usage
from ..digits import deliver
from ..kernel import runtime_folder
from ..model import ModelError, ModelReply, ModelRequest, Stream
from ..partial import tokens_in
from ..results import valid_text
from . import installs, translate
from .failures import ADVICE, BROKEN_STREAM, failure, named
from .pace import Pace, Passing

_EXTRA = re.compile(r"pydantic-ai-slim\[([\w-]+)\]")
_KEY = re.compile("key|token|credentials", re.IGNORECASE)
ROUNDS: Final = "anthropic"
"""Whose client takes the arguments of earlier calls as objects, not as texts."""
TELLING: Final = frozenset(
    {
        "AnthropicModel",
        "BedrockConverseModel",
        "GoogleModel",
        "GroqModel",
        "HuggingFaceModel",
        "MistralModel",
        "OpenAIChatModel",
    }
)
"""The models of pydantic-ai whose protocols say of each whole answer why it ends."""


class NoKey(UsageError):
    """A model has no key here."""


def check(name: str, base_url: str | None) -> None:
    """Raises UsageError for a model that is not known, whose client is missing, or that is nowhere else."""
    kind, _ = parse_model_id(name)
    if kind is None:
        raise UsageError(f"unknown model {name!r}: use provider:model, script:FILE or a Python callable")
    try:
        found = infer_provider_class(kind)
    except ValueError:
        raise UsageError(f"unknown model {name!r}: pydantic-ai knows no provider {kind!r}") from None
    except ImportError as error:
        extra = _EXTRA.search(str(error))
        what = installs(extra[1]) if extra else f"{installs(kind)}; {error}"
        raise UsageError(f"model {name!r} needs its provider's client: {what}") from error
    if base_url and ("/" in kind or "base_url" not in inspect.signature(found).parameters):
        raise UsageError(f"model {name!r} takes no base_url: its provider is where pydantic-ai says")


def service(name: str, base_url: str | None) -> Any:
    """What pydantic-ai reaches a model's provider by. Raises UsageError, which is NoKey where there is no key to it."""
    check(name, base_url)
    kind = name.partition(":")[0]
    options: dict[str, Any] = {"base_url": base_url} if base_url else {}
    if kind == ROUNDS:
        options["http_client"] = create_async_httpx2_client()
        options["http_client"].event_hooks = {"request": [deliver]}
    try:
        return infer_provider_class(kind)(**options) if options else infer_provider(kind)
    except Exception as error:  # SDKs have errors of their own for what their settings lack
        what = re.split(",? or pass |, pass ", (str(error) or repr(error)).splitlines()[0])[0]  # the rest is for Python
        no_key = isinstance(error, UserError) and _KEY.search(what)
        raise (NoKey if no_key else UsageError)(f"model {name!r} cannot be asked: {what}") from error


@dataclass
class Provider:
    """A model of a provider's that is asked from one event loop."""

    name: str
    model: ProviderModel[Any]
    pace: Pace = field(default_factory=Pace)

    @property
    def _tells(self) -> bool:
        """Whether each whole answer says why it ends."""
        return any(kind.__name__ in TELLING for kind in type(self.model).__mro__)

    @property
    def at(self) -> str:
        """The provider, whatever the model."""
        return f"{self.name.partition(':')[0]} {self.model.base_url}"

    @classmethod
    def open(cls, name: str, base_url: str | None) -> Provider:
        """Raises UsageError for a model that cannot be asked, and ModelError where there is no key to it."""
        try:
            reached = service(name, base_url)
            model = infer_model(name, lambda _: reached)
        except NoKey as error:
            raise ModelError(f"{error.message}; {ADVICE['bad_key']}", "bad_key") from error
        except UserError as error:
            raise UsageError(f"model {name!r} cannot be asked: {error}") from error
        provider = cls(name, model)
        provider.pace.board = runtime_folder("providers") / hashlib.sha256(provider.at.encode()).hexdigest()[:16]
        return provider

    async def answer(self, request: ModelRequest, settings: Mapping[str, Any], stream: Stream) -> ModelReply:
        """The answer to a request. Raises ModelError."""
        messages = translate.conversation(request, carry=self.name.startswith(f"{ROUNDS}:"))
        said = translate.settings(request, settings)
        parameters = translate.parameters(request)

        heard = False

        async def response() -> ModelResponse:
            nonlocal heard
            heard, hearing = False, _Hearing(stream)
            try:
                async with model_request_stream(
                    self.model, messages, model_settings=said, model_request_parameters=parameters
                ) as coming:
                    async for event in coming:
                        heard = True
                        hearing.take(event, translate.tokens(coming.usage))
                    return coming.get()
            except NotImplementedError:  # pydantic-ai has no streams of this provider's
                return await model_request(
                    self.model, messages, model_settings=said, model_request_parameters=parameters
                )

        async def ask() -> ModelReply:
            trouble: Passing | ModelError = Passing(named("unavailable", self.name, BROKEN_STREAM))
            try:
                whole = await response()
                if translate.is_whole(whole, self._tells):
                    return translate.reply(whole, said.get("max_tokens"))
            except ModelAPIError as error:
                trouble = failure(error, self.name)
            except UnexpectedModelBehavior as error:
                trouble = Passing(named("unavailable", self.name, error))
            if isinstance(trouble, Passing):
                trouble.heard = heard
            raise trouble

        return await self.pace.answered(ask)


class _Hearing:
    """Passes on what comes. What is no text of the answer, its thoughts for one, has its cost all the same: that is
    estimated until the provider tells it."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._told, self._characters = stream, Usage(), 0
        self._has_more = False
        """Than text."""

    def take(self, event: ModelResponseStreamEvent, usage: Usage) -> None:
        text, unseen = _text(event), _unseen(event)
        self._characters += len(text) + len(unseen)
        self._has_more = self._has_more or bool(unseen)
        if text:
            self._stream.text(valid_text(text))
        if usage != self._told:
            self._told = usage
            self._stream.usage(usage)
        if self._has_more:
            output = max(usage.output_tokens, tokens_in(self._characters))
            self._stream.told = usage.model_copy(update={"output_tokens": output})


def _text(event: ModelResponseStreamEvent) -> str:
    match event:
        case PartStartEvent(part=TextPart(content=text)):
            return text
        case PartDeltaEvent(delta=TextPartDelta(content_delta=text)):
            return text
    return ""


def _unseen(event: ModelResponseStreamEvent) -> str:
    match event:
        case PartStartEvent(part=ThinkingPart(content=str(text)) | ToolCallPart(args=str(text))):
            return text
        case PartDeltaEvent(delta=ThinkingPartDelta(content_delta=str(text)) | ToolCallPartDelta(args_delta=str(text))):
            return text
    return ""
