"""Streams with one writer, and a model of them small enough to be believed.

The writer does one thing after the other, so at any moment at most one operation is in doubt. After a crash
the streams must be as they were before it or as they are after it, all together; then the doubt is over.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import orjson

from crash.gate import pick
from crash.wire import JSON, TEXT, Answer, Content, LostError, NotSentError, Wire

CLOSE = {"Stream-Closed": "true"}

MOSTLY_APPENDS = {"append": 12, "batch": 4, "produce": 8, "close": 1, "end": 1, "delete": 1}
# With many names: each stream is touched seldom, so that its changes lie in different journal files.
MOSTLY_ENDS = {"append": 1, "produce": 2, "close": 4, "end": 2, "delete": 1}


@dataclass
class Modelled:
    """One stream of the model."""

    json: bool
    entries: list[bytes] = field(default_factory=list)
    closed: bool = False
    gone: bool = False  # deleted, but forks still need it
    parent: str | None = None
    producer: tuple[int, int] | None = None  # epoch and last sequence


Model = dict[str, Modelled]
Change = Callable[[Model], None]


@dataclass
class Operation:
    """A request, and what it does to the model if it takes effect."""

    method: str
    name: str
    change: Change
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    repeat_status: int | None = None  # of the same request once more; None: it must not be repeated


class Family:
    """A handful of names on which one writer creates, appends, closes, forks, deletes and creates again."""

    def __init__(
        self, name: str, seed: object, names: int = 4, kinds: Mapping[str, int] = MOSTLY_APPENDS
    ) -> None:
        self._kinds = dict(kinds)
        self._names = [f"{name}/{index}" for index in range(names)]
        self._id = name
        self.random = random.Random(f"{seed} {name}")
        self.model: Model = {}
        self._doubt: Operation | None = None
        self._repeat: tuple[Operation, int | None] | None = None  # and the status it must get, if known
        self._serial = 0

    def step(self, wire: Wire) -> None:
        operation, expected = self._repeat or (self._choose(), None)
        self._repeat = None
        try:
            answer = wire.send(operation.method, operation.name, operation.body, operation.headers)
        except NotSentError:
            raise
        except LostError:
            self._doubt = None if expected is not None else operation
            raise
        if expected is not None:
            assert answer.status == expected, (operation, answer)
        elif answer.ok:
            operation.change(self.model)
        else:
            self._refused(operation, answer)

    def _refused(self, operation: Operation, answer: Answer) -> None:
        """Only a server in trouble refuses what the model allows."""
        if answer.status == 429:
            return
        assert answer.status in (408, 503, 507), (operation, answer, self.model)
        assert answer.code in ("unavailable", "insufficient_storage", "append_timeout")
        self._doubt = operation
        raise LostError

    def settle(self, wire: Wire) -> None:
        actual = self._read(wire)
        before = self._shape(self.model)
        if self._doubt is None:
            assert actual == before, self._difference(before, actual)
            return
        changed = copy.deepcopy(self.model)
        self._doubt.change(changed)
        after = self._shape(changed)
        if actual != before:
            assert actual == after, f"{self._doubt}\n{self._difference(after, actual)}"
            self.model = changed
        if self._doubt.repeat_status is not None and before != after:
            self._repeat = (self._doubt, self._doubt.repeat_status if actual != before else None)
        self._doubt = None

    def _read(self, wire: Wire) -> dict[str, object]:
        found: dict[str, object] = {}
        for name in self._names:
            content = wire.read_all(name)
            if isinstance(content, Content):
                found[name] = (content.entries, content.closed)
            else:
                assert content.code in ("not_found", "stream_gone")
                found[name] = content.status
        return found

    def _shape(self, model: Model) -> dict[str, object]:
        """The model as readers would see it."""
        seen: dict[str, object] = {}
        for name in self._names:
            stream = model.get(name)
            seen[name] = 404 if stream is None else 410 if stream.gone else (stream.entries, stream.closed)
        return seen

    def _difference(self, expected: dict[str, object], actual: dict[str, object]) -> str:
        lines = [f"{self._id}: the streams are not what was acknowledged"]
        for name in self._names:
            if expected[name] != actual[name]:
                lines.append(
                    f"{name}\n  expected {expected[name]!r:.2000}\n  found    {actual[name]!r:.2000}"
                )
        return "\n".join(lines)

    # -- choosing what to do next ------------------------------------------------------------------------

    def _choose(self) -> Operation:
        name = self.random.choice(self._names)
        stream = self.model.get(name)
        if stream is None:
            sources = [other for other, found in self.model.items() if not found.gone]
            if sources and self.random.random() < 0.5:
                return self._fork(name, self.random.choice(sources))
            return self._create(name)
        if stream.gone:
            # Some stream is at the end of the chain; deleting those is what sets this one free.
            return self._delete(self.random.choice([n for n, found in self.model.items() if not found.gone]))
        if stream.closed:
            return self._delete(name) if self.random.random() < 0.5 else self._close(name)
        kind = pick(self.random, self._kinds)
        if kind == "close":
            return self._close(name)
        if kind == "delete":
            return self._delete(name)
        return self._append(name, kind)

    def _entry(self, json: bool) -> bytes:
        self._serial += 1
        pad = "y" * self.random.choice((0, 5, 50, self.random.randint(0, 3000)))
        if json:
            return orjson.dumps({"f": self._id, "n": self._serial, "p": pad})
        return f"{self._id} {self._serial} {pad}\n".encode()

    def _create(self, name: str) -> Operation:
        json = self.random.random() < 0.5
        entries = [self._entry(json)] if self.random.random() < 0.3 else []
        closed = bool(entries) and self.random.random() < 0.1

        def change(model: Model) -> None:
            model[name] = Modelled(json, list(entries), closed)

        headers = {**(JSON if json else TEXT), **(CLOSE if closed else {})}
        return Operation("PUT", name, change, headers, b"".join(entries), 200)

    def _fork(self, name: str, source: str) -> Operation:
        """At the start, at the tail, after some messages (JSON), with a copy of the first entry (bytes)."""
        stream = self.model[source]
        headers = {"Stream-Forked-From": f"/v1/stream/{source}"}
        taken = len(stream.entries)
        if taken and self.random.random() < 0.7:
            taken = self.random.randint(0, taken if stream.json else 1)
            headers["Stream-Fork-Offset"] = "-1"
            if taken:
                headers["Stream-Fork-Sub-Offset"] = str(taken if stream.json else len(stream.entries[0]))

        def change(model: Model) -> None:
            model[name] = Modelled(stream.json, model[source].entries[:taken], parent=source)

        return Operation("PUT", name, change, headers, repeat_status=200)

    def _append(self, name: str, kind: str) -> Operation:
        stream = self.model[name]
        headers = dict(JSON if stream.json else TEXT)
        count = self.random.randint(2, 5) if kind == "batch" and stream.json else 1
        entries = [self._entry(stream.json) for _ in range(count)]
        body = b"[" + b",".join(entries) + b"]" if count > 1 else entries[0]
        claim = stream.producer
        closes = kind == "end"
        if kind == "produce" or (closes and self.random.random() < 0.5):
            epoch, last = claim or (0, -1)
            claim = (epoch, last + 1) if self.random.random() < 0.95 else (epoch + 1, 0)
            headers["Producer-Id"] = self._id
            headers["Producer-Epoch"], headers["Producer-Seq"] = str(claim[0]), str(claim[1])
        if closes:
            headers |= CLOSE

        def change(model: Model) -> None:
            model[name].entries.extend(entries)
            model[name].producer = claim
            model[name].closed = closes

        return Operation("POST", name, change, headers, body, 204 if "Producer-Id" in headers else None)

    def _close(self, name: str) -> Operation:
        def change(model: Model) -> None:
            model[name].closed = True

        return Operation("POST", name, change, CLOSE, repeat_status=204)

    def _delete(self, name: str) -> Operation:
        forked = any(other.parent == name for other in self.model.values())

        def change(model: Model) -> None:
            remove(model, name)

        return Operation("DELETE", name, change, repeat_status=410 if forked else 204)


def brief(seen: object) -> str:
    """A stream in one line: its entries without their padding."""
    if not isinstance(seen, tuple):
        return str(seen)
    entries, closed = cast("tuple[list[bytes], bool]", seen)
    shown = " ".join(re.sub(rb"y{6,}", b"~", entry).decode().strip() for entry in entries)
    return f"{len(entries)} entries, {'closed' if closed else 'open'}: {shown}"


def remove(model: Model, name: str) -> None:
    """Deletes a stream; one with forks stays for them, and goes with the last of them."""
    if any(other.parent == name for other in model.values()):
        model[name].gone = True
        return
    parent = model.pop(name).parent
    if parent is not None and model[parent].gone and not any(s.parent == parent for s in model.values()):
        remove(model, parent)
