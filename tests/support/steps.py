"""Plays the server for the client's steps: no socket, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tailrace.client.transport import (
    BrokenConnectionError,
    CloseStream,
    Effect,
    Reply,
    SendRequest,
    Sleep,
    Steps,
)
from tailrace.client.wire import HttpRequest, HttpResponse

T = TypeVar("T")
OFFSET = "00000000000000000004000000"


def answer(status: int, body: bytes = b"", **headers: str) -> HttpResponse:
    return HttpResponse(status, {name.replace("_", "-"): value for name, value in headers.items()}, body)


class Stage:
    """Answers requests from a script, in order, and remembers what was done."""

    def __init__(self, *script: Reply | BrokenConnectionError) -> None:
        self._script = list(script)
        self.effects: list[Effect] = []

    @property
    def requests(self) -> list[HttpRequest]:
        return [effect.request for effect in self.effects if isinstance(effect, SendRequest)]

    @property
    def pauses(self) -> list[float]:
        return [effect.seconds for effect in self.effects if isinstance(effect, Sleep)]

    @property
    def left(self) -> int:
        return len(self._script)

    def add(self, script: Iterable[Reply | BrokenConnectionError]) -> None:
        self._script.extend(script)

    def run(self, steps: Steps[T]) -> T:
        try:
            effect = next(steps)
            while True:
                self.effects.append(effect)
                if isinstance(effect, Sleep | CloseStream):
                    effect = steps.send(None)
                    continue
                assert self._script, f"nothing left in the script for {effect}"
                reply = self._script.pop(0)
                effect = steps.throw(reply) if isinstance(reply, BrokenConnectionError) else steps.send(reply)
        except StopIteration as stop:
            return stop.value


def header(request: HttpRequest, name: str) -> bytes | None:
    return dict(request.headers).get(name)
