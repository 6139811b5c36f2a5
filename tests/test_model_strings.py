"""Model strings: which are taken, and what is said of those that cannot be asked, before anything starts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from perdure.actors.model import ModelError, check_model
from perdure.actors.providers.provider import Provider
from perdure.store.errors import UsageError

from .provider_kit import keys

HERE = "http://127.0.0.1:1/v1"


def test_a_model_that_there_cannot_be_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nonsense:x", "anthropc:claude-sonnet-5-5"):
        with pytest.raises(UsageError, match="knows no provider"):
            check_model(name, Path())
    check_model("anthropic:claude-sonnet-5-5", Path())
    monkeypatch.setitem(sys.modules, "mistralai", None)
    with pytest.raises(UsageError, match=r"\[mistral\]"):
        check_model("mistral:large", Path())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'perdure\[anthropic\]'"):
        check_model("anthropic:claude-sonnet-5-5", Path())


def test_an_address_is_refused_where_the_provider_takes_none() -> None:
    for name in ("deepseek:chat", "azure:gpt-4o", "gateway/openai:gpt-5-mini"):
        with pytest.raises(UsageError, match=f"model '{name}' takes no base_url"):
            check_model(name, Path(), HERE)
    check_model("ollama:qwen3", Path(), HERE, from_here=True)


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("anthropic:claude-sonnet-5-5", "ANTHROPIC_API_KEY"),
        ("openai:gpt-5-mini", "OPENAI_API_KEY"),
        ("openrouter:x/y", "OPENROUTER_API_KEY"),
        ("gateway/anthropic:claude-sonnet-5-5", "PYDANTIC_AI_GATEWAY_API_KEY"),
        ("ollama:qwen3", "OLLAMA_BASE_URL"),
    ],
)
def test_what_a_model_lacks_here_is_named_in_one_line(name: str, lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys(monkeypatch)
    monkeypatch.setenv("PYDANTIC_AI_GATEWAY_BASE_URL", HERE)
    monkeypatch.delenv(lacks, raising=False)
    check_model(name, Path())  # it may be asked from elsewhere
    with pytest.raises(UsageError, match=f"model '{name}' cannot be asked: Set the `{lacks}`") as refused:
        check_model(name, Path(), from_here=True)
    assert "\n" not in refused.value.message and "pass" not in refused.value.message
    monkeypatch.setenv(lacks, HERE)
    check_model(name, Path(), from_here=True)


def test_an_error_of_the_client_itself_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore", None)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UsageError, match="model 'bedrock-mantle:x' cannot be asked: Bedrock"):
        check_model("bedrock-mantle:x", Path(), HERE, from_here=True)


def test_a_run_ends_for_the_lack_of_a_key_under_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ModelError) as failed:
        Provider.open("openrouter:x/y", None)
    assert failed.value.code == "bad_key" and "OPENROUTER_API_KEY" in failed.value.message
