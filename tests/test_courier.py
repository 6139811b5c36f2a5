"""Requests between two actors: every one is answered once, in few calls, whatever happens to the calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from perdure.actors.courier import Courier, Desk, DeskFailure, Numbered, Reply
from perdure.store.errors import UsageError
from perdure.store.log import Refused

from .fakes import held, settle_down, until


class Office:
    """A desk that can be replaced, behind a line that can be cut. Requests are answered when a test says so."""

    def __init__(self, prompt: bool = False) -> None:
        self.prompt = prompt
        self.served: list[Any] = []
        self.calls: list[list[Any]] = []
        self.errors: list[Exception] = []
        """What the next calls raise after the desk has been reached."""
        self.unheard: list[asyncio.Future[Reply]] = []
        self.doors: dict[Any, asyncio.Event] = {}
        self.replace()

    def replace(self) -> None:
        """A new process: it knows nothing of what was asked before, and the old one's calls fail."""
        self.gone = asyncio.Event()
        self.desk = Desk(self._serve)

    def kill(self) -> None:
        self.gone.set()
        self.replace()

    async def _serve(self, payload: Any) -> Any:
        self.served.append(payload)
        if not self.prompt:
            await self.doors.setdefault(payload, asyncio.Event()).wait()
        if isinstance(payload, Exception):
            raise payload
        return f"answer to {payload}"

    def answer(self, payload: Any) -> None:
        self.doors.setdefault(payload, asyncio.Event()).set()

    async def call(self, name: str, incarnation: str | None, requests: list[Numbered], done: list[int]) -> Reply:
        self.calls.append([payload for _, payload in requests])
        gone, desk = self.gone, self.desk
        if self.errors:
            error = self.errors.pop(0)
            self.unheard.append(asyncio.ensure_future(desk.exchange(name, incarnation, requests, done)))
            await settle_down(5)
            raise error
        exchange = asyncio.ensure_future(desk.exchange(name, incarnation, requests, done))
        cut = asyncio.ensure_future(gone.wait())
        await asyncio.wait({exchange, cut}, return_when=asyncio.FIRST_COMPLETED)
        cut.cancel()
        if not exchange.done():
            exchange.cancel()
            raise ConnectionError("the process is gone")
        return exchange.result()

    def courier(self, **options: Any) -> Courier:
        return Courier(self.call, pause_s=0, **options)


async def test_every_request_gets_its_own_answer_whatever_their_order() -> None:
    office = Office()
    courier = office.courier()
    asked = {number: courier.ask(number) for number in range(20)}
    await until(lambda: len(office.served) == 20)
    for number in reversed(range(20)):
        office.answer(number)
    answers = [await held(asked[number]) for number in range(20)]
    assert answers == [f"answer to {number}" for number in range(20)]
    assert Counter(office.served) == Counter(range(20))
    courier.close()


async def test_requests_made_together_travel_in_one_call_and_their_answers_too() -> None:
    office = Office(prompt=True)
    courier = office.courier()
    await held(asyncio.gather(*(courier.ask(number) for number in range(100))))
    assert office.calls[0] == list(range(100))
    assert len(office.calls) <= 3
    courier.close()


async def test_a_request_that_waits_long_does_not_hold_up_a_later_one() -> None:
    office = Office()
    courier = office.courier()
    slow = courier.ask("slow")
    await until(lambda: office.served == ["slow"])
    office.answer("quick")
    assert await held(courier.ask("quick")) == "answer to quick"
    assert not slow.done()
    office.answer("slow")
    assert await held(slow) == "answer to slow"
    courier.close()


async def test_an_idle_courier_makes_no_calls() -> None:
    office = Office(prompt=True)
    courier = office.courier()
    await held(courier.ask(1))
    await settle_down()
    before = len(office.calls)
    await settle_down()
    assert len(office.calls) == before


async def test_a_replaced_desk_is_asked_again_for_what_is_unanswered_and_for_nothing_else() -> None:
    office = Office()
    courier = office.courier()
    office.answer("answered")
    assert await held(courier.ask("answered")) == "answer to answered"
    waiting = [courier.ask(name) for name in ("a", "b")]
    await until(lambda: len(office.served) == 3)
    office.kill()
    await until(lambda: len(office.served) == 5)
    assert Counter(office.served) == {"answered": 1, "a": 2, "b": 2}
    office.answer("a")
    office.answer("b")
    assert await held(asyncio.gather(*waiting)) == ["answer to a", "answer to b"]
    courier.close()


async def test_a_desk_that_is_replaced_without_a_broken_call_is_noticed() -> None:
    office = Office()
    courier = office.courier()
    office.answer("first")
    await held(courier.ask("first"))
    waiting = courier.ask("a")
    await until(lambda: office.served == ["first", "a"])
    office.replace()  # calls to the old one stay open; the next one meets the new one
    office.answer("b")
    assert await held(courier.ask("b")) == "answer to b"
    await until(lambda: office.served.count("a") == 2)
    office.answer("a")
    assert await held(waiting) == "answer to a"
    courier.close()


async def test_a_call_that_fails_is_tried_again_and_the_request_is_not_executed_twice() -> None:
    office = Office()
    courier = office.courier()
    office.errors = [ConnectionError("cut"), ConnectionError("cut again")]
    asked = courier.ask("a")
    await until(lambda: len(office.calls) == 3)
    office.answer("a")
    assert await held(asked) == "answer to a"
    assert office.served == ["a"]
    courier.close()


async def test_an_answer_whose_reply_was_lost_is_given_again_and_the_request_is_not_executed_twice() -> None:
    office = Office(prompt=True)
    courier = office.courier()
    office.errors = [ConnectionError("the reply was lost")]
    assert await held(courier.ask("a")) == "answer to a"
    assert office.served == ["a"]
    courier.close()


async def test_a_repeated_exchange_does_not_execute_a_running_request_twice() -> None:
    office = Office()
    desk = office.desk
    first = asyncio.create_task(desk.exchange("client", None, [(1, "a")], []))
    await until(lambda: office.served == ["a"])
    second = asyncio.create_task(desk.exchange("client", None, [(1, "a")], []))
    assert (await held(first)).answers == [], "a newer poll releases the older one"
    office.answer("a")
    assert (await held(second)).answers == [(1, "answer to a")]
    assert office.served == ["a"]


async def test_a_poll_that_nothing_answers_comes_back_empty() -> None:
    desk = Desk(Office()._serve, poll_s=0)
    reply = await held(desk.exchange("client", None, [(1, "a")], []))
    assert reply == Reply(desk.incarnation, [])


async def test_an_answer_is_not_given_to_a_poll_that_a_newer_one_has_replaced() -> None:
    """The older call may have been given up: an answer in its reply would be heard by nobody."""
    office = Office()
    older = asyncio.create_task(office.desk.exchange("client", None, [(1, "a")], []))
    await until(lambda: office.served == ["a"])
    newer = asyncio.create_task(office.desk.exchange("client", None, [(1, "a")], []))
    office.answer("a")  # both polls wake for it
    assert (await held(newer)).answers == [(1, "answer to a")]
    assert (await held(older)).answers == []


async def test_an_answer_that_was_lost_on_its_way_is_given_again_to_a_later_poll() -> None:
    office = Office(prompt=True)
    desk = office.desk
    lost = await held(desk.exchange("client", None, [(1, "a")], []))
    assert lost.answers == [(1, "answer to a")]
    desk._poll_s = 0
    assert (await held(desk.exchange("client", None, [], []))).answers == lost.answers


async def test_a_confirmed_answer_is_forgotten() -> None:
    office = Office(prompt=True)
    await held(office.desk.exchange("client", None, [(1, "a")], []))
    office.desk._poll_s = 0
    assert (await held(office.desk.exchange("client", None, [], [1]))).answers == []
    assert office.desk._clients["client"].ready == {}


async def test_two_clients_with_equal_numbers_are_kept_apart() -> None:
    office = Office(prompt=True)
    one, other = office.courier(), office.courier()
    assert await held(asyncio.gather(one.ask("a"), other.ask("b"))) == ["answer to a", "answer to b"]


async def test_an_error_of_the_protocol_reaches_the_asker_as_it_is_and_another_is_wrapped() -> None:
    office = Office(prompt=True)
    courier = office.courier()
    with pytest.raises(Refused) as refusal:
        await held(courier.ask(Refused("conflict", "behind")))
    assert refusal.value.reason == "conflict"
    with pytest.raises(UsageError):
        await held(courier.ask(UsageError("no")))
    with pytest.raises(DeskFailure, match="KeyError: 'x'"):
        await held(courier.ask(KeyError("x")))


async def test_the_verdict_that_the_desk_is_lost_fails_what_waits_and_what_comes_later() -> None:
    office = Office()
    courier = office.courier(lost=lambda error: isinstance(error, BrokenPipeError))
    waiting = [courier.ask(number) for number in range(3)]
    await until(lambda: len(office.served) == 3)
    office.errors = [ConnectionError("a hiccup"), BrokenPipeError("a verdict")]
    waiting.append(courier.ask(3))
    for future in waiting:
        with pytest.raises(BrokenPipeError):
            await held(future)
    with pytest.raises(BrokenPipeError):
        await held(courier.ask(4))


async def test_a_frozen_desk_is_asked_again_after_a_time() -> None:
    calls: list[list[Numbered]] = []

    async def call(name: str, incarnation: str | None, requests: list[Numbered], done: list[int]) -> Reply:
        calls.append(requests)
        if len(calls) == 1:
            await asyncio.Event().wait()
        return Reply("i", [(number, "late") for number, _ in requests])

    courier = Courier(call, pause_s=0, timeout_s=0)
    assert await held(courier.ask("a")) == "late"
    assert len(calls) == 2


async def test_closing_cancels_what_waits() -> None:
    office = Office()
    courier = office.courier()
    waiting = courier.ask("a")
    await until(lambda: office.served == ["a"])
    courier.close()
    with pytest.raises(asyncio.CancelledError):
        await held(waiting)
