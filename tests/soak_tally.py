# SPDX-License-Identifier: Apache-2.0
"""The kinds of requests of a mixed load, and what became of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

KINDS = {  # how often, of 100
    "grpc stream": 30,
    "grpc whole": 15,
    "grpc unary": 8,
    "http generate": 8,
    "http stream": 7,
    "question": 8,
    "release": 2,
    "bad": 9,
    "deadline": 2,
    "left": 6,
    "left in queue": 3,
    "left http": 2,
}
LEAVING = ("left", "left in queue", "left http")
COUNTED = tuple(kind for kind in KINDS if kind not in ("release", "bad", *LEAVING))  # in hubkv_requests_finished_total


@dataclass
class Tally:
    """What became of the requests of a load.

    Attributes:
        done: by kind, requests that ended as they should.
        refused: by kind, times that one was refused as the server was busy; it was sent again.
        wrong: an answer that is not the one of the engine alone, or an error that is not the right one.
        lost: no answer in time, or a broken connection.
        left: requests whose clients went before the end.
    """

    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    killed: int = 0

    @property
    def left(self) -> int:
        return self.killed + sum(self.done[kind] for kind in LEAVING)

    def add(self, other: Tally) -> None:
        self.done += other.done
        self.refused += other.refused
        self.wrong += other.wrong
        self.lost += other.lost
        self.killed += other.killed

    def check_counters(self, before: dict[str, float], after: dict[str, float]) -> None:
        """What the server counted, of both models together, is what its clients saw. Those that left may have ended
        in any way, or have gone before the model saw them."""
        grown = {key: after[key] - before[key] for key in after}
        finished = sum(n for key, n in grown.items() if key.startswith("hubkv_requests_finished_total"))
        answered = sum(self.done[kind] for kind in COUNTED)
        assert answered <= finished <= answered + self.left, (answered, finished, self.left)
        refused, seen = grown["hubkv_requests_refused_total"], self.refused.total()
        assert seen <= refused <= seen + self.left, (seen, refused, self.left)
        assert grown['hubkv_requests_finished_total{reason="error"}'] == 0
        assert grown['hubkv_requests_finished_total{reason="aborted"}'] <= self.left
