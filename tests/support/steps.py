"""Plays the server for the client's steps: no socket, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tailrace.client.steps import BrokenError, Effect, HangUp, Pause, Reply, Send, Steps
from tailrace.client.wire import Answer, Request

T = TypeVar("T")
OFFSET = "00000000000000000004000000"


def answer(status: int, body: bytes = b"", **headers: str) -> Answer:
    return Answer(status, {name.replace("_", "-"): value for name, value in headers.items()}, body)


class Stage:
    """Answers requests from a script, in order, and remembers what was done."""

    def __init__(self, *script: Reply | BrokenError) -> None:
        self._script = list(script)
        self.effects: list[Effect] = []

    @property
    def requests(self) -> list[Request]:
        return [effect.request for effect in self.effects if isinstance(effect, Send)]

    @property
    def pauses(self) -> list[float]:
        return [effect.seconds for effect in self.effects if isinstance(effect, Pause)]

    @property
    def left(self) -> int:
        return len(self._script)

    def add(self, script: Iterable[Reply | BrokenError]) -> None:
        self._script.extend(script)

    def run(self, steps: Steps[T]) -> T:
        try:
            effect = next(steps)
            while True:
                self.effects.append(effect)
                if isinstance(effect, Pause | HangUp):
                    effect = steps.send(None)
                    continue
                assert self._script, f"nothing left in the script for {effect}"
                reply = self._script.pop(0)
                effect = steps.throw(reply) if isinstance(reply, BrokenError) else steps.send(reply)
        except StopIteration as stop:
            return stop.value


def header(request: Request, name: str) -> bytes | None:
    return dict(request.headers).get(name)
