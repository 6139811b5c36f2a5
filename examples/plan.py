"""What the demonstration asks of its runs, and whom it kills when. Pure, so that two demonstrations are alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .support_desk import shop_order

RUNS_PER_ROUND = 20
"""In each round every kind of process is killed once."""


@dataclass(frozen=True)
class Hang:
    """A refund that hangs before or after the payment, and what is killed then: the process that executes it, or
    the journal, with which its tools die."""

    run: int
    order: str
    moment: str
    target: str


def orders_of(run: int) -> list[str]:
    """Two orders for each run, of which at least one is damaged."""
    return [str(100 + run), str(101 + run)]


def rounds(runs: int) -> int:
    return max(1, runs // RUNS_PER_ROUND)


def hangs(runs: int) -> Iterator[Hang]:
    """Two refunds in each round, spread over the runs."""
    count = 2 * rounds(runs)
    for place in range(count):
        run = (place + 1) * runs // (count + 1)
        order = next(order for order in orders_of(run) if shop_order(order)["damaged"])
        target = "journal" if place % 2 else "tool worker"
        moment = "after" if (place + place // 2) % 2 else "before"
        yield Hang(run, order, moment, target)


def points(runs: int) -> Iterator[tuple[float, str]]:
    """Shares of the runs that have ended, and what is killed then."""
    for place in range(rounds(runs)):
        yield (place + 0.2) / rounds(runs), "run actor"
        yield (place + 0.6) / rounds(runs), "supervisor"
