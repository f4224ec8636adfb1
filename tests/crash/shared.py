"""One stream, many writers: what each of them was promised, and a reader who remembers what it was shown."""

from __future__ import annotations

import random
from collections.abc import Mapping

import orjson

from crash.wire import JSON, Answer, Content, LostError, NotSentError, Wire

PAD_BYTES_MAX = 2000
# An append that was answered so did not happen, and never will.
REFUSED = frozenset({400, 403, 404, 409, 413, 429, 503, 507})


class Attempt:
    """One append: `count` messages that are there together, at one place, or not at all."""

    __slots__ = ("count", "entry", "outcome")

    def __init__(self, count: int) -> None:
        self.count = count
        self.outcome = "open"  # open | acknowledged | refused | unknown | absent
        self.entry = 0  # of the last message, as the acknowledgement said


class SharedStream:
    """The stream as a whole, checked once after each crash."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.found: dict[tuple[str, int], list[int]] = {}  # entry numbers, by writer and append
        self.entries: list[bytes] = []

    def create(self, wire: Wire) -> None:
        answer = wire.send("PUT", self.name, headers=JSON)
        assert answer.status in (200, 201), answer

    def load(self, wire: Wire) -> None:
        content = wire.read_all(self.name)
        assert isinstance(content, Content), content
        assert not content.closed
        before = self.entries
        assert content.entries[: len(before)] == before, "entries that were there changed or moved"
        self.entries = content.entries
        self.found = {}
        counts: dict[tuple[str, int], int] = {}
        for entry, raw in enumerate(content.entries, 1):
            message = orjson.loads(raw)
            append = (message["w"], message["n"])
            places = self.found.setdefault(append, [])
            places.append(entry)
            counts[append] = message["of"]
            assert message["i"] == len(places), f"append {append} is there twice, or out of order"
            assert entry - places[0] == len(places) - 1, f"append {append} was torn apart"
        for append, places in self.found.items():
            assert len(places) == counts[append], f"only a part of append {append} is there"


class SharedWriter:
    """Appends to the shared stream. Subclasses say how they tell the server who they are."""

    def __init__(self, stream: SharedStream, writer: str, seed: object, batch_max: int = 1) -> None:
        self.stream = stream
        self.writer = writer
        self.random = random.Random(f"{seed} {writer}")
        self._batch_max = batch_max
        self.attempts: list[Attempt] = []

    def headers(self, number: int) -> Mapping[str, str]:
        return JSON

    def step(self, wire: Wire) -> None:
        self._append(wire, len(self.attempts))

    def _append(self, wire: Wire, number: int) -> None:
        count = self.random.randint(1, self._batch_max)
        attempt = Attempt(count)
        self.attempts.append(attempt)
        self._try(wire, number, attempt)

    def body(self, number: int, count: int) -> bytes:
        pad = "x" * self.random.choice((0, 10, 100, self.random.randint(0, PAD_BYTES_MAX)))
        messages = [{"w": self.writer, "n": number, "i": i + 1, "of": count, "p": pad} for i in range(count)]
        return orjson.dumps(messages if count > 1 else messages[0])

    def _try(self, wire: Wire, number: int, attempt: Attempt) -> Answer:
        try:
            answer = wire.send(
                "POST", self.stream.name, self.body(number, attempt.count), self.headers(number)
            )
        except NotSentError:
            attempt.outcome = "refused"
            raise
        except LostError:
            attempt.outcome = "unknown"
            raise
        if answer.ok:
            attempt.outcome = "acknowledged"
            attempt.entry = answer.entry
        else:
            certain = answer.status in REFUSED and b'"outcome":"unknown"' not in answer.body
            attempt.outcome = "refused" if certain else "unknown"
        return answer

    def settle(self, wire: Wire) -> None:
        """Compares the books with the stream, which `SharedStream.load` has just read."""
        last = 0
        for number, attempt in enumerate(self.attempts):
            places = self.stream.found.get((self.writer, number))
            self._check(number, attempt, places)
            if places is not None:
                assert places[0] > last, f"{self.writer}: append {number} is out of order"
                last = places[-1]
        numbers = [number for writer, number in self.stream.found if writer == self.writer]
        assert len(numbers) <= len(self.attempts), f"{self.writer}: there is more than was sent"

    def _check(self, number: int, attempt: Attempt, places: list[int] | None) -> None:
        what = f"{self.writer}: append {number} ({attempt.outcome})"
        if attempt.outcome == "acknowledged":
            assert places is not None, f"{what} is lost"
            assert len(places) == attempt.count, f"{what} has {len(places)} of {attempt.count} messages"
            if attempt.entry:
                assert places[-1] == attempt.entry, f"{what} moved from {attempt.entry} to {places[-1]}"
        elif attempt.outcome in ("refused", "absent"):
            assert places is None, f"{what} is there all the same"
        else:
            # From here on it is certain what became of it, and it may not change again.
            attempt.outcome = "absent" if places is None else "acknowledged"
            attempt.entry = 0 if places is None else places[-1]


class ProducerWriter(SharedWriter):
    """An idempotent producer: repeats what was not acknowledged, and raises its epoch now and then."""

    def __init__(self, stream: SharedStream, writer: str, seed: object) -> None:
        super().__init__(stream, writer, seed, batch_max=3)
        self._epoch = 0
        self._seq = 0
        self._count = 0  # messages of the append under way; 0 if there is none
        self.duplicates = 0

    def headers(self, number: int) -> Mapping[str, str]:
        return {
            **JSON,
            "Producer-Id": self.writer,
            "Producer-Epoch": str(self._epoch),
            "Producer-Seq": str(self._seq),
        }

    def step(self, wire: Wire) -> None:
        if not self._count:
            self._count = self.random.randint(1, self._batch_max)
            self.attempts.append(Attempt(self._count))
        number = len(self.attempts) - 1
        attempt = self.attempts[number]
        known = attempt.outcome == "acknowledged"  # seen by `settle` although nobody told us
        answer = self._try(wire, number, attempt)
        if not answer.ok:
            assert answer.status in (429, 503, 507, 408), answer
            return
        if answer.status == 204:
            self.duplicates += 1
            attempt.entry = 0  # a duplicate is answered with the tail
        assert not known or answer.status == 204, "an append that was there was taken a second time"
        assert answer.headers["producer-seq"] == str(self._seq), answer
        self._count = 0
        self._seq += 1
        if self.random.random() < 0.02:
            self._epoch += 1
            self._seq = 0


class SeqWriter(SharedWriter):
    """Guards itself with Stream-Seq: a repeated append is refused if the first one took effect."""

    def __init__(self, stream: SharedStream, writer: str, seed: object) -> None:
        super().__init__(stream, writer, seed, batch_max=2)
        self._repeat = False

    def headers(self, number: int) -> Mapping[str, str]:
        return {**JSON, "Stream-Seq": f"{number:010}"}

    def step(self, wire: Wire) -> None:
        if not self._repeat:
            self.attempts.append(Attempt(self.random.randint(1, self._batch_max)))
        number = len(self.attempts) - 1
        attempt = self.attempts[number]
        before = attempt.outcome
        self._repeat = True
        answer = self._try(wire, number, attempt)
        if answer.status == 409:
            assert answer.code == "seq_conflict"
            assert before not in ("absent", "refused"), "it was not there, but its Stream-Seq was"
            attempt.outcome = "acknowledged"
        elif answer.ok:
            assert before != "acknowledged", "an append that was there was taken a second time"
        self._repeat = not answer.ok and answer.status != 409


class Follower:
    """A live reader: nobody is shown an entry that a crash can take back."""

    def __init__(self, stream: SharedStream) -> None:
        self.stream = stream
        self.seen: list[bytes] = []
        self._offset = "-1"

    def step(self, wire: Wire) -> None:
        answer = wire.send(
            "GET", self.stream.name, query=f"?live=long-poll&offset={self._offset}&timeout_ms=300"
        )
        if answer.status == 200:
            self.seen.extend(orjson.dumps(message) for message in orjson.loads(answer.body))
        else:
            assert answer.status == 204, answer
        self._offset = answer.headers["stream-next-offset"]

    def settle(self, wire: Wire) -> None:
        assert self.stream.entries[: len(self.seen)] == self.seen, "a reader saw what is no longer there"


class Loader:
    """Reads the shared stream back before the writers compare their books with it."""

    def __init__(self, stream: SharedStream) -> None:
        self.stream = stream

    def step(self, wire: Wire) -> None:
        """Reads from random places while others write."""
        answer = wire.send("HEAD", self.stream.name)
        assert answer.status == 200, answer

    def settle(self, wire: Wire) -> None:
        self.stream.load(wire)
