"""Writers that run until the server dies, wait together until it is back, and go on."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from crash.wire import LostError, Wire


class Writer(Protocol):
    """Somebody who does one thing after the other and keeps book of what was promised."""

    def step(self, wire: Wire) -> None:
        """One operation. May raise LostError, after which the server is dead and `settle` comes next."""

    def settle(self, wire: Wire) -> None:
        """The server is back and nobody writes: compare what is there with what was promised."""


class Crew:
    """One thread per writer. All rest at the gate while it is closed."""

    def __init__(self, port: int, writers: Sequence[Writer]) -> None:
        self._port = port
        self.writers = writers
        self._changed = threading.Condition()
        self._open = False
        self._resting = 0  # at the gate
        self._stranded = 0  # without a server, the gate still open
        self._ended = False
        self._failure: BaseException | None = None
        self.steps = 0
        self._threads = [
            threading.Thread(target=self._work, args=(writer,), daemon=True) for writer in writers
        ]
        for thread in self._threads:
            thread.start()
        self.wait_until(lambda: self._resting == len(self._threads))

    def go(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def rest(self) -> None:
        """Closes the gate and waits until everybody is there."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        self.wait_until(lambda: self._resting == len(self._threads))

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(60)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: condition() or self._failure is not None, timeout_s)
        if self._failure is not None:
            raise self._failure
        assert done, "the writers made no progress"

    def wait_steps(self, count: int) -> None:
        """Returns when this many more operations were done, or the server has died under everybody."""
        target = self.steps + count
        self.wait_until(lambda: self.steps >= target or self._stranded == len(self._threads))

    def settle(self) -> None:
        """Every writer checks its own books, in order, with the others at rest."""
        wire = Wire(self._port)
        for writer in self.writers:
            writer.settle(wire)
        wire.close()

    def _work(self, writer: Writer) -> None:
        wire = Wire(self._port)
        lost = False
        while self._pass_gate(lost):
            lost = False
            try:
                writer.step(wire)
            except LostError:
                lost = True
            except BaseException as error:  # noqa: BLE001 - whatever it is, the test must see it
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self.steps += 1
                self._changed.notify_all()
        wire.close()

    def _pass_gate(self, lost: bool) -> bool:
        """Waits while the gate is closed; whoever lost the server waits for the gate to close first."""
        with self._changed:
            if lost:
                self._stranded += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._open or self._ended)
                self._stranded -= 1
            if not self._open and not self._ended:
                self._resting += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._open or self._ended)
                self._resting -= 1
            return not self._ended


def pick(random_source: random.Random, choices: dict[str, int]) -> str:
    """One of the names, by weight."""
    return random_source.choices(list(choices), list(choices.values()))[0]
