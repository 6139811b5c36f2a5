"""Data sets: one meaning whatever the file's dress, and every fault told with its line before anything runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from perdure import UsageError
from perdure.batch.dataset import LINE_BYTES_MAX, Dataset, Sample

PLAIN = (
    '{"id": "a", "input": "first", "kind": 1}\n'
    '{"id": 2, "input": {"q": ["second"]}}\n'
    '"third\\u2028line"\n'
    '{"input": "bro\\ud800ken"}\n'
)


def samples(folder: Path, content: bytes | str, limit: int | None = None) -> list[Sample]:
    path = folder / "data.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(Dataset(path, limit))


def refusal(folder: Path, content: bytes | str) -> str:
    with pytest.raises(UsageError) as caught:
        samples(folder, content)
    assert "\n" not in caught.value.message
    return caught.value.message.replace(f"{folder}/", "")


def without_lines(found: list[Sample]) -> list[tuple[str, object, object]]:
    return [(sample.id, sample.input, sample.metadata) for sample in found]


def test_a_line_is_an_object_or_an_input(tmp_path: Path) -> None:
    first, second, third, fourth = samples(tmp_path, PLAIN)
    assert first == Sample(1, "a", "first", {"kind": 1})
    assert second == Sample(2, "2", {"q": ["second"]}, {})
    assert third.input == "third\u2028line"
    assert fourth.input == "bro\ufffdken", "a lone surrogate is no character and is replaced"


@pytest.mark.parametrize(
    "dressed",
    [
        b"\xef\xbb\xbf" + PLAIN.encode(),
        PLAIN.replace("\n", "\r\n").encode(),
        PLAIN.replace("\n", "\n\n  \n").encode(),
        PLAIN.rstrip("\n").encode(),
        PLAIN.replace("\\u2028", "\u2028").encode(),
        PLAIN.replace("ud800", "uDFFF").encode(),
    ],
    ids=["byte order mark", "CRLF", "blank lines", "no final newline", "raw U+2028", "another surrogate"],
)
def test_the_dress_of_a_file_changes_nothing(tmp_path: Path, dressed: bytes) -> None:
    assert without_lines(samples(tmp_path, dressed)) == without_lines(samples(tmp_path, PLAIN))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('"fine"\n{"input": \n', "data.jsonl, line 2: it is not JSON"),
        ('"fine"\n[1]\n', "data.jsonl, line 2: it is a list, not an object or a string"),
        ("null\n", "data.jsonl, line 1: it is null"),
        ('"fine"\n\n{"id": 1}\n', "data.jsonl, line 3: it has no `input`"),
        ('{"id": 1.5, "input": "x"}', "line 1: its `id` is a number, not a string or a whole number"),
        ('{"id": true, "input": "x"}', "line 1: its `id` is true or false"),
        ('{"id": "", "input": "x"}', "line 1: its `id` is empty"),
        ('{"input": NaN}', "line 1: it is not JSON: NaN"),
        ('{"input": 1e999}', "line 1: it is not JSON: 1e999 is too large"),
        ('"fine"\n"\udcff"\n'.encode("utf-8", "surrogateescape"), "line 2: it is not UTF-8"),
        ('"fine"\n'.encode("utf-16"), "line 1: the file is UTF-16"),
        ('"fine"\n'.encode("utf-16-le"), "line 1: it holds NUL bytes"),
        ('{"input": ' + "[" * 150 + "]" * 150 + "}", "line 1: it is not JSON: it is nested more than 100"),
        ('{"input": ' + "[" * 99_999 + "]" * 99_999 + "}", "line 1: it is not JSON: it is nested more than 100"),
        ('{"input": ' + "9" * 5000 + "}", "line 1: it is not JSON"),
        (b'"fine"\n"' + b"x" * LINE_BYTES_MAX + b'"\n', "line 2: it is longer than 16 MiB"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: bytes | str, told: str) -> None:
    assert told in refusal(tmp_path, content)


@pytest.mark.parametrize("content", ["", "\n \n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_an_error_and_not_a_success(tmp_path: Path, content: bytes | str) -> None:
    assert "is empty" in refusal(tmp_path, content)


@pytest.mark.parametrize(
    ("first", "second"),
    [('"a"', '"a"'), ("1", '"1"'), ('"caf\u00e9"', '"cafe\u0301"')],
    ids=["equal", "a number and its text", "two Unicode forms"],
)
def test_clashing_ids_are_refused_with_both_lines(tmp_path: Path, first: str, second: str) -> None:
    told = refusal(tmp_path, f'{{"id": {first}, "input": "x"}}\n\n{{"id": {second}, "input": "y"}}\n')
    assert re.search(r"line 3: id .* is that of line 1 too", told)


def test_ids_may_differ_in_case_only_and_be_of_any_length_and_alphabet(tmp_path: Path) -> None:
    ids = ["a", "A", "../../etc/passwd", ".", "\U0001f600", "x" * 300, "01", "1", " 1"]
    lines = "".join(f'{{"id": "{one}", "input": "x"}}\n' for one in ids)
    assert [sample.id for sample in samples(tmp_path, lines)] == ids


def test_a_missing_id_survives_lines_that_are_inserted_elsewhere(tmp_path: Path) -> None:
    before = samples(tmp_path, '"same"\n"other"\n"same"\n')
    assert len({sample.id for sample in before}) == 3
    after = samples(tmp_path, '"new"\n"same"\n{"input": "other"}\n"same"\n')
    assert [sample.id for sample in after][1:] == [sample.id for sample in before]


def test_a_limit_takes_the_first_samples(tmp_path: Path) -> None:
    assert [sample.id for sample in samples(tmp_path, PLAIN, limit=2)] == ["a", "2"]


def test_a_file_that_changes_between_two_readings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(PLAIN)
    dataset = Dataset(path)
    assert len(list(dataset)) == 4
    path.write_text(PLAIN + '"more"\n')
    with pytest.raises(UsageError, match="was changed while it was read"):
        list(dataset)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path, told in ((tmp_path, "cannot be read"), (tmp_path / "none", "No such file")):
        with pytest.raises(UsageError, match=told):
            list(Dataset(path))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDWR)
    try:
        with pytest.raises(UsageError, match="is not a file"):
            list(Dataset(pipe))
    finally:
        os.close(descriptor)
