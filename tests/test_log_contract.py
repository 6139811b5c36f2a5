"""What every event log does, whatever keeps it: the same sentences for memory and for SQL."""

from __future__ import annotations

from dataclasses import replace

from perdure.store.events import (
    AssistantMessage,
    RunCancelled,
    RunCompleted,
    RunTimedOut,
    ToolResult,
    TurnStarted,
    Usage,
)
from perdure.store.log import (
    Abandon,
    Accepted,
    Answer,
    Append,
    Cancel,
    Claim,
    Command,
    Create,
    EventLog,
    Expire,
    Leave,
    Refused,
    Requeue,
    Result,
    Unsettle,
)
from perdure.store.states import Status

from .store_kit import (
    LEASE,
    RUN,
    Clock,
    accept,
    cancel,
    created,
    decides,
    failed,
    mark,
    message,
    queued,
    refuse,
    request,
    requeue,
    result,
    retry,
    running,
    settles,
    started,
    unsettled,
    with_calls,
)

# -- creating and claiming ------------------------------------------------------------------------------------


async def test_a_created_run_is_queued_and_its_row_says_what_was_created(log: EventLog) -> None:
    event = created(batch="b1", sample="s1", priority=3)
    accepted = await accept(log, Create(RUN, event))
    row = await log.run(RUN)
    assert row == accepted.row
    assert row is not None
    assert (row.status, row.seq, row.epoch, row.agent, row.digest) == (Status.QUEUED, 1, 0, "shop:agent", "d1")
    assert (row.batch, row.sample, row.priority, row.created_at) == ("b1", "s1", 3, 1000.0)
    assert [(s.seq, s.at, s.epoch, s.event) for s in await log.read(RUN)] == [(1, 1000.0, 0, event)]


async def test_a_run_is_created_once(log: EventLog) -> None:
    await queued(log)
    assert (await refuse(log, Create(RUN, created()))).reason == "exists"


async def test_an_unknown_run_is_empty_and_every_command_but_create_says_not_found(log: EventLog) -> None:
    commands: list[Command] = [
        Claim(RUN, "e", "nonce", 0),
        Append(RUN, 1, 0, (TurnStarted(turn_index=0),)),
        mark(),
        Leave(RUN, "c1", 1),
        retry(),
        Result(RUN, result()),
        Unsettle(RUN, unsettled()),
        Answer(RUN, result()),
        decides(),
        settles("abandon"),
        Expire(RUN, "nonce"),
        Cancel(RUN, cancel()),
        Requeue(RUN, requeue()),
        Abandon(RUN, "nonce", 0, failed()),
    ]
    assert [(await refuse(log, command)).reason for command in commands] == ["not_found"] * len(commands)
    assert (await log.run(RUN), await log.read(RUN), await log.calls(RUN)) == (None, [], [])


async def test_an_unknown_call_is_not_found(log: EventLog) -> None:
    await running(log)
    about = (
        mark(),
        Leave(RUN, "c1", 1),
        retry(),
        Result(RUN, result()),
        Answer(RUN, result()),
        decides(),
        settles("abandon"),
    )
    for command in about:
        assert (await refuse(log, command)).reason == "not_found"


async def test_a_claim_raises_the_epoch_and_is_granted_again_to_who_repeats_it(log: EventLog, clock: Clock) -> None:
    await running(log)
    clock.now += 1
    first = await accept(log, Claim(RUN, "again", LEASE.nonce, 1, "respawn", charged=True))
    repeated = await accept(log, Claim(RUN, "again", LEASE.nonce, 1, "respawn", charged=True))
    assert (first.row.epoch, first.row.charges, first.row.claim_id) == (2, (1001.0,), "again")
    assert (repeated.already, repeated.row) == (True, first.row)


async def test_only_the_holder_of_the_lease_may_claim_or_abandon(log: EventLog) -> None:
    row = await running(log)
    await log.take_lease(replace(LEASE, nonce="super-2"), LEASE.nonce)
    assert (await refuse(log, Claim(RUN, "late", LEASE.nonce, row.epoch))).reason == "stale_lease"
    assert (await refuse(log, Abandon(RUN, LEASE.nonce, row.epoch, failed()))).reason == "stale_lease"
    await accept(log, Claim(RUN, "new", "super-2", row.epoch))


async def test_a_claim_that_saw_an_older_epoch_is_refused(log: EventLog) -> None:
    await running(log)
    assert (await refuse(log, Claim(RUN, "late", LEASE.nonce, 0))).reason == "stale_epoch"


async def test_an_ended_run_is_not_claimed(log: EventLog) -> None:
    row = await running(log)
    await accept(log, Abandon(RUN, LEASE.nonce, row.epoch, failed()))
    assert (await refuse(log, Claim(RUN, "e", LEASE.nonce, row.epoch))).reason == "ended"


# -- the owner's append ---------------------------------------------------------------------------------------


async def test_an_append_gives_seq_without_gaps_and_sums_the_usage(log: EventLog, clock: Clock) -> None:
    row = await running(log)
    clock.now = 1005.0
    spent = Usage(input_tokens=10, output_tokens=2, cache_read_input_tokens=5)
    for index in range(2):
        said = AssistantMessage(turn_index=index, text="hm", stop_reason="end", usage=spent)
        row = (await accept(log, Append(RUN, 1, row.seq, (TurnStarted(turn_index=index), said)))).row
    assert [stored.seq for stored in await log.read(RUN)] == [1, 2, 3, 4, 5, 6]
    assert (row.turns, row.usage.input_tokens, row.usage.cache_read_input_tokens, row.updated_at) == (2, 20, 10, 1005.0)
    assert await log.run(RUN) == row


async def test_an_append_without_events_only_asks_who_owns_the_run(log: EventLog) -> None:
    row = await running(log)
    accepted = await accept(log, Append(RUN, 1, row.seq))
    assert (accepted.events, accepted.already, accepted.row) == ((), False, row)
    assert (await refuse(log, Append(RUN, 0, row.seq))).reason == "stale_epoch"


async def test_an_append_of_an_older_owner_is_refused(log: EventLog) -> None:
    row = await running(log)
    await accept(log, Claim(RUN, "new", LEASE.nonce, 1))
    assert (await refuse(log, Append(RUN, 1, row.seq, (TurnStarted(turn_index=0),)))).reason == "stale_epoch"


async def test_a_conflict_carries_the_newer_events(log: EventLog) -> None:
    row = await running(log)
    await accept(log, Cancel(RUN, cancel("enough")))
    refused = await refuse(log, Append(RUN, 1, row.seq, (TurnStarted(turn_index=0),)))
    assert refused.reason == "conflict"
    assert [(stored.seq, stored.event.type) for stored in refused.newer] == [(3, "cancel_requested")]
    assert list(refused.newer) == await log.read(RUN, row.seq)


async def test_an_append_ahead_of_the_log_conflicts_and_has_nothing_newer_to_show(log: EventLog) -> None:
    row = await running(log)
    refused = await refuse(log, Append(RUN, 1, row.seq + 1, (TurnStarted(turn_index=0),)))
    assert (refused.reason, refused.newer) == ("conflict", ())


async def test_a_repeated_append_is_there_already(log: EventLog) -> None:
    row = await running(log)
    command = Append(RUN, 1, row.seq, (TurnStarted(turn_index=0), message(), request()))
    first = await accept(log, command)
    repeated = await accept(log, command)
    assert (repeated.already, repeated.events, repeated.row) == (True, first.events, first.row)
    assert repeated.calls == first.calls
    await accept(log, mark())
    assert (await accept(log, command)).already, "also when the log has moved on"


async def test_an_append_whose_start_is_there_appends_the_rest(log: EventLog) -> None:
    row = await running(log)
    start, said = TurnStarted(turn_index=0), message()
    await accept(log, Append(RUN, 1, row.seq, (start,)))
    accepted = await accept(log, Append(RUN, 1, row.seq, (start, said, request())))
    assert [stored.event.type for stored in accepted.events] == [
        "turn_started",
        "assistant_message",
        "tool_call_requested",
    ]
    assert [stored.seq for stored in await log.read(RUN)] == [1, 2, 3, 4, 5]


async def test_an_append_of_which_only_the_start_is_there_before_something_else_conflicts(log: EventLog) -> None:
    row = await running(log)
    start = TurnStarted(turn_index=0)
    await accept(log, Append(RUN, 1, row.seq, (start,)))
    await accept(log, Cancel(RUN, cancel()))
    refused = await refuse(log, Append(RUN, 1, row.seq, (start, message())))
    assert (refused.reason, len(refused.newer)) == ("conflict", 2)


async def test_the_start_of_a_turn_and_its_rest_may_come_in_one_group(log: EventLog) -> None:
    row = await running(log)
    start = TurnStarted(turn_index=0)
    first, rest = await log.commit([Append(RUN, 1, row.seq, (start,)), Append(RUN, 1, row.seq, (start, message()))])
    assert isinstance(first, Accepted)
    assert isinstance(rest, Accepted)
    assert [stored.seq for stored in rest.events] == [3, 4]


async def test_what_is_not_the_owners_to_append_is_illegal(log: EventLog) -> None:
    row = await with_calls(log)
    decisions = decides().event, settles("abandon").event
    for event in (started(), cancel(), requeue(), unsettled(), created(), *decisions, RunTimedOut(reason="late")):
        assert (await refuse(log, Append(RUN, 1, row.seq, (event,)))).reason == "illegal"


async def test_an_append_that_the_state_table_forbids_leaves_nothing(log: EventLog) -> None:
    row = await with_calls(log)
    closing = (result(), RunCompleted(output=None, stop_reason="end"), message())
    assert (await refuse(log, Append(RUN, 1, row.seq, closing))).reason == "illegal"
    done = RunCompleted(output=None, stop_reason="end")
    assert (await refuse(log, Append(RUN, 1, row.seq, (done,)))).reason == "illegal", "a call is open"


async def test_a_call_id_is_used_once_in_a_run_even_after_its_call_was_closed(log: EventLog) -> None:
    row = await with_calls(log)
    assert (await refuse(log, Append(RUN, 1, row.seq, (request(),)))).reason == "illegal"
    row = (await accept(log, Result(RUN, result()))).row
    again = TurnStarted(turn_index=1), message(1), request(index=1)
    assert (await refuse(log, Append(RUN, 1, row.seq, again))).reason == "illegal"


async def test_a_refused_command_leaves_the_rest_of_its_group_in(log: EventLog) -> None:
    row = await running(log)
    verdicts = await log.commit(
        [
            Append(RUN, 1, row.seq, (TurnStarted(turn_index=0),)),
            Append(RUN, 0, row.seq, (message(),)),
            Create(RUN, created()),
            Append(RUN, 1, row.seq + 1, (message(),)),
            Create("run-2", created()),
        ]
    )
    assert [verdict.reason if isinstance(verdict, Refused) else "" for verdict in verdicts] == [
        "",
        "stale_epoch",
        "exists",
        "",
        "",
    ]
    assert [stored.event.type for stored in await log.read(RUN, 2)] == ["turn_started", "assistant_message"]
    assert await log.run("run-2") is not None


async def test_a_group_without_commands_has_no_verdicts(log: EventLog) -> None:
    assert await log.commit([]) == []


# -- cancel, requeue, abandon ---------------------------------------------------------------------------------


async def test_cancel_ends_a_queued_run_at_once(log: EventLog) -> None:
    await queued(log)
    accepted = await accept(log, Cancel(RUN, cancel("changed my mind")))
    assert [stored.event.type for stored in accepted.events] == ["cancel_requested", "run_cancelled"]
    assert (accepted.row.status, accepted.row.error, accepted.row.end_seq) == (Status.CANCELLED, "changed my mind", 3)
    assert (await refuse(log, Cancel(RUN, cancel()))).reason == "ended"


async def test_cancel_of_a_requeued_run_closes_each_open_call_with_one_true_result(log: EventLog) -> None:
    requests = request("c1"), request("c2"), request("c3", "read_only"), request("c4", "idempotent_write")
    await with_calls(log, *requests)
    await accept(log, mark("c2"))
    await accept(log, Abandon(RUN, LEASE.nonce, 1, failed()))
    await accept(log, Requeue(RUN, requeue()))
    accepted = await accept(log, Cancel(RUN, cancel()))
    closed = [s.event for s in accepted.events if isinstance(s.event, ToolResult)]
    assert [event.tool_call_id for event in closed] == ["c1", "c2", "c3", "c4"]
    for event, words in zip(
        closed, ("never started", "may have taken effect", "not needed", "may have run"), strict=True
    ):
        assert words in event.content
    assert (accepted.row.status, accepted.calls) == (Status.CANCELLED, ())


async def test_cancel_of_a_live_run_is_a_fence_that_is_set_once(log: EventLog) -> None:
    row = await with_calls(log)
    first = await accept(log, Cancel(RUN, cancel()))
    assert (first.row.cancel, first.row.status) == (True, Status.AWAITING_TOOL)
    assert (await accept(log, Cancel(RUN, cancel()))).already
    refused = await refuse(log, Append(RUN, 1, row.seq + 1, (result(), TurnStarted(turn_index=1), request("c2"))))
    assert refused.reason == "cancelled", "no call is requested any more"
    ending = (*(result(source="cancel"),), RunCancelled(reason="user"))
    done = await accept(log, Append(RUN, 1, row.seq + 1, ending))
    assert (done.row.status, done.row.error) == (Status.CANCELLED, "user")


async def test_an_ended_run_takes_no_append_of_its_owner(log: EventLog) -> None:
    row = await running(log)
    row = (await accept(log, Append(RUN, 1, row.seq, (RunCompleted(output=1, stop_reason="end"),)))).row
    assert (row.status, row.end_seq) == (Status.COMPLETED, 3)
    assert (await refuse(log, Append(RUN, 1, row.seq, (TurnStarted(turn_index=0),)))).reason == "ended"
    assert (await refuse(log, Abandon(RUN, LEASE.nonce, 1, failed()))).reason == "ended"


async def test_a_failed_run_is_requeued_with_its_open_calls_and_a_clean_record(log: EventLog) -> None:
    await with_calls(log, request("c1"), request("c2"))
    await accept(log, mark())
    await accept(log, Unsettle(RUN, unsettled()))
    await accept(log, Abandon(RUN, LEASE.nonce, 1, failed()))
    again = await accept(log, Requeue(RUN, requeue()))
    assert (again.row.status, again.row.error, again.row.end_seq, again.row.charges) == (Status.QUEUED, None, None, ())
    assert [(call.unsettled, call.started_attempt) for call in again.calls] == [(False, 1), (False, 0)]
    assert list(again.calls) == await log.calls(RUN)
    claimed = await accept(log, Claim(RUN, "again", LEASE.nonce, 1))
    assert claimed.row.status is Status.AWAITING_TOOL


async def test_only_a_run_that_ended_badly_is_requeued(log: EventLog) -> None:
    row = await running(log)
    assert (await refuse(log, Requeue(RUN, requeue()))).reason == "not_ended"
    await accept(log, Append(RUN, 1, row.seq, (RunCompleted(output=1, stop_reason="end"),)))
    assert (await refuse(log, Requeue(RUN, requeue()))).reason == "ended"


async def test_abandon_fails_a_run_of_the_epoch_that_was_seen(log: EventLog) -> None:
    await running(log)
    assert (await refuse(log, Abandon(RUN, LEASE.nonce, 0, failed()))).reason == "stale_epoch"
    row = (await accept(log, Abandon(RUN, LEASE.nonce, 1, failed("crash_loop")))).row
    assert (row.status, row.error, row.end_seq) == (Status.FAILED, "crash_loop", 3)
