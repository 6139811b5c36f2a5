"""What every event log does with leases, and how it is read and listed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perdure.store.events import TurnStarted
from perdure.store.log import Accepted, Append, Cancel, Claim, Create, EventLog, Result
from perdure.store.states import Status

from .store_kit import (
    LEASE,
    RUN,
    Clock,
    accept,
    cancel,
    created,
    message,
    queued,
    refuse,
    request,
    result,
    running,
    with_calls,
)

# -- leases ---------------------------------------------------------------------------------------------------


async def test_a_lease_is_taken_by_compare_and_set(log: EventLog) -> None:
    second = replace(LEASE, nonce="super-2", pid=101)
    assert await log.lease("supervisor") is None
    assert not await log.take_lease(LEASE, "somebody"), "nobody holds it"
    assert await log.take_lease(LEASE, None)
    assert not await log.take_lease(second, None)
    assert not await log.take_lease(second, "somebody")
    assert await log.lease("supervisor") == LEASE
    assert await log.take_lease(second, LEASE.nonce)
    assert await log.lease("supervisor") == second


async def test_a_lease_is_renewed_by_its_holder_and_given_back_by_nobody_else(log: EventLog) -> None:
    await log.take_lease(LEASE, None)
    longer = replace(LEASE, expires_at=2e9)
    assert await log.take_lease(longer, LEASE.nonce)
    await log.drop_lease("supervisor", "somebody")
    assert await log.lease("supervisor") == longer
    await log.drop_lease("supervisor", LEASE.nonce)
    await log.drop_lease("supervisor", LEASE.nonce)
    assert await log.lease("supervisor") is None


async def test_leases_of_different_names_are_independent(log: EventLog) -> None:
    assert await log.take_lease(LEASE, None)
    assert await log.take_lease(replace(LEASE, name="journal", nonce="j"), None)
    await queued(log)
    assert (await refuse(log, Claim(RUN, "e", "j", 0))).reason == "stale_lease"


# -- reading --------------------------------------------------------------------------------------------------


async def test_a_log_is_read_in_pages(log: EventLog) -> None:
    row = await running(log)
    turns = tuple(event for index in range(5) for event in (TurnStarted(turn_index=index), message(index)))
    await accept(log, Append(RUN, 1, row.seq, turns))
    everything = await log.read(RUN)
    assert [stored.seq for stored in everything] == list(range(1, 13))
    assert await log.read(RUN, 4) == everything[4:]
    assert await log.read(RUN, 4, 3) == everything[4:7]
    assert await log.read(RUN, 12) == []
    assert await log.read(RUN, 0, 0) == []


async def test_runs_are_listed_newest_first_and_swept_by_priority_and_age(log: EventLog, clock: Clock) -> None:
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 5)):
        await queued(log, name, priority=priority)
        clock.now += 1
    assert [row.run_id for row in await log.runs()] == ["d", "c", "b", "a"]
    assert [row.run_id for row in await log.runs(oldest_first=True)] == ["b", "d", "a", "c"]
    assert [row.run_id for row in await log.runs(oldest_first=True, limit=2)] == ["b", "d"]


async def test_runs_of_one_age_are_in_order_of_id(log: EventLog) -> None:
    for name in ("b", "a", "c"):
        await queued(log, name)
    assert [row.run_id for row in await log.runs()] == ["a", "b", "c"]
    assert [row.run_id for row in await log.runs(ids=["c", "a", "c", "nobody"], limit=1)] == ["a"]


async def test_runs_match_all_filters(log: EventLog) -> None:
    for name, batch in (("x1", "b1"), ("x2", "b2"), ("y1", "b1")):
        await queued(log, name, batch=batch)
    await accept(log, Cancel("y1", cancel()))

    async def found(**filters: object) -> list[str]:
        return [row.run_id for row in await log.runs(**filters)]  # type: ignore[arg-type]

    assert await found(batch="b1") == ["x1", "y1"]
    assert await found(batch="b1", statuses=[Status.QUEUED]) == ["x1"]
    assert await found(statuses=[Status.QUEUED, Status.CANCELLED], prefix="y") == ["y1"]
    assert await found(ids=["x2", "y1"], statuses=[Status.CANCELLED]) == ["y1"]
    assert await found(statuses=[]) == []
    assert await found(ids=[]) == []


@pytest.mark.parametrize("prefix", ["a%", "a_", "a\\", "a*", "A", "a", "", "a\ud7ff", "\U0010ffff"])
async def test_a_prefix_means_its_characters_and_nothing_else(log: EventLog, prefix: str) -> None:
    names = ["a%1", "ab1", "a_1", "a\\1", "a*1", "A1", "b", "a\ud7ff1", "a\ue0001", "\U0010ffff1"]
    for name in names:
        await queued(log, name)
    assert {row.run_id for row in await log.runs(prefix=prefix)} == {n for n in names if n.startswith(prefix)}


async def test_runs_are_counted_by_status(log: EventLog) -> None:
    for name, batch in (("a", "b1"), ("b", "b1"), ("c", None)):
        await queued(log, name, batch=batch)
    await accept(log, Cancel("a", cancel()))
    assert await log.counts() == {Status.QUEUED: 2, Status.CANCELLED: 1}
    assert await log.counts("b1") == {Status.QUEUED: 1, Status.CANCELLED: 1}
    assert await log.counts("nobody") == {}


async def test_calls_are_in_order_of_request_whatever_their_ids(log: EventLog) -> None:
    ids = ["z", "m", "a", "k", "b"]
    accepted_row = await with_calls(log, *(request(call_id, "read_only") for call_id in ids))
    assert [call.tool_call_id for call in await log.calls(RUN)] == ids
    await accept(log, Result(RUN, result("m")))
    asked = await accept(log, Append(RUN, 1, accepted_row.seq + 1))
    assert [call.tool_call_id for call in asked.calls] == ["z", "a", "k", "b"]


async def test_open_calls_and_ends_of_many_logs_are_read_at_once(log: EventLog) -> None:
    row = await with_calls(log, *(request(call_id, "read_only") for call_id in ("z", "m", "a")))
    await accept(log, Result(RUN, result("m")))
    await queued(log, "other")
    many = [RUN, "other", "none", *(f"none-{number}" for number in range(1000))]
    calls = await log.open_calls(many)
    assert {run_id: [call.tool_call_id for call in mine] for run_id, mine in calls.items()} == {RUN: ["z", "a"]}
    ends = await log.read_after({RUN: row.seq, "other": 0, **dict.fromkeys(many[2:], 0)})
    assert ends == {RUN: await log.read(RUN, row.seq), "other": await log.read("other")}
    assert await log.read_after({RUN: row.seq + 1}) == await log.read_after({}) == {}
    assert await log.open_calls([]) == {}


async def test_a_hundred_open_calls_and_a_thousand_ids_are_no_limit(log: EventLog) -> None:
    row = await with_calls(log, *(request(f"c{number}", "read_only") for number in range(100)))
    assert row.seq == 104
    many = await log.commit([Create(f"many-{number:04}", created()) for number in range(1000)])
    assert all(isinstance(verdict, Accepted) for verdict in many)
    assert len(await log.runs(ids=[f"many-{number:04}" for number in range(1000)])) == 1000
    verdicts = await log.commit([Result(RUN, result(f"c{number}")) for number in range(100)])
    assert all(isinstance(verdict, Accepted) for verdict in verdicts)


async def test_a_part_of_a_blob_is_kept_once_and_read_as_it_was(log: EventLog) -> None:
    data = bytes(range(256)) * 1000
    for part in (data, data[::-1], data):
        await log.keep("d1", 0, part)
    await log.keep("d1", 1, b"")
    assert [await log.kept("d1", part) for part in range(3)] == [data, b"", None]
    assert await log.kept("d2", 0) is None
