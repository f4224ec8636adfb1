"""Actors of a hub that is killed again and again, and what each of them knows for certain."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

from websockets.exceptions import ConnectionClosed

from support.hub_client import Actor, Frame
from support.server import ServerProcess
from tailrace.auth import create_token

SECRET = "a-shared-secret-of-more-than-32-bytes!"
TOPIC = "jobs/all"
GROUP = {"topic": "jobs/#", "durable": True, "group": "crew"}
WORDS = ["mailbox", "delivery-notices"]
_ids = count(1)


class Sent(NamedTuple):
    """One message. What was not answered is sent again under its id, at the time it is then."""

    number: int
    to: str  # an address, or the topic
    frame: dict[str, Any]


class Book:
    """What became of every message, as far as anybody was told."""

    def __init__(self) -> None:
        self.numbers = count(1)
        self.sent: dict[int, tuple[str, str]] = {}  # sender and recipient
        self.accepted: set[int] = set()
        self.refused: set[int] = set()
        self.unknown: set[int] = set()  # the answer took longer than the message had
        self.heard: defaultdict[str, list[int]] = defaultdict(list)  # by recipient, in order, each once
        self.done: dict[tuple[str, str], str] = {}  # stream and offset of what was committed, and by whom


class Member:
    """One address, with a token for it and for nothing else."""

    def __init__(self, server: ServerProcess, book: Book, name: str, options: dict[str, Any]) -> None:
        self.server, self.book = server, book
        self.address = f"@(crew/{name})"
        self.options = options
        self.token = create_token(SECRET, sub=f"crew/{name}", scopes=["read"])
        self.actor: Actor | None = None
        self.waiting: dict[str, Sent] = {}  # sent and not answered, in order
        self.seqs: defaultdict[str, int] = defaultdict(int)
        self.version = 0
        self.holds: dict[tuple[str, str], Frame] = {}  # by stream and offset: given to it, not committed
        self.commits: dict[str, list[tuple[str, str]]] = {}  # not answered
        self.last_from: dict[str, int] = {}  # by sender: its last direct message on this connection

    @property
    def manual(self) -> bool:
        return self.options.get("commit") == "manual"

    # -- coming and going ------------------------------------------------------------------------------

    def come(self) -> None:
        """Takes its address, and repeats what it got no answer to."""
        self.actor = actor = Actor(self.server, self.address, token=self.token, words=WORDS)
        assert actor.connected["type"] == "hub:connected", actor.connected
        self.holds.clear()
        self.last_from.clear()
        registered = actor.register(ttlSeconds=3600, **self.options)["payload"]
        assert registered["version"] > self.version, "versions only grow"
        self.version = registered["version"]
        if self.options.get("commit") == "manual" and self.options.get("durable"):
            assert actor.ask("hub:subscribe", GROUP)["type"] == "hub:subscribed"
        for sent in self.waiting.values():
            self._write(sent)

    def gone(self) -> None:
        """The connection is lost; what had arrived is read to the end."""
        actor, self.actor = self.actor, None
        if actor is None:
            return
        with suppress(ConnectionClosed, TimeoutError, OSError):
            while True:
                self.take(actor.take())
        self.commits.clear()
        actor.cut()

    def leave(self, *, politely: bool) -> None:
        actor, self.actor = self.actor, None
        assert actor is not None
        for frame in actor.quiet():
            self.take(frame)
        self.commits.clear()
        if politely:
            actor.close()
        else:
            actor.cut()

    # -- speaking --------------------------------------------------------------------------------------

    def send(self, to: str, claimed: str, *, producer: bool, ttl_ms: int | None) -> None:
        number = next(self.book.numbers)
        self.book.sent[number] = (self.address, to)
        kind, payload = "hub:send", {"to": to, "type": "n", "data": number, "ack": "accepted"}
        if to == TOPIC:
            kind, payload = "hub:publish", {"topic": to, "type": "n", "data": number}
        frame: dict[str, Any] = {"type": kind, "payload": payload, "from": claimed, "pattern": "ask"}
        frame |= {"id": f"crew-{next(_ids)}", "ttl": ttl_ms, "metadata": {}}
        if producer and to != TOPIC:
            frame["metadata"] = {"producer": {"id": "p", "epoch": 0, "seq": self.seqs[to]}}
            self.seqs[to] += 1
        sent = self.waiting[frame["id"]] = Sent(number, to, frame)
        self._write(sent)

    def _write(self, sent: Sent) -> None:
        assert self.actor is not None
        frame = dict(sent.frame)
        self.actor.write(frame.pop("type"), **frame)

    def commit(self, places: list[tuple[str, str]], *, reject: bool) -> None:
        """Without waiting for the answer; all of one stream."""
        assert self.actor is not None
        stream = places[0][0]
        offsets = [offset for _, offset in places]
        payload: dict[str, Any] = {"actorAddress": self.address, "stream": stream}
        payload["subscriptionId"] = self.holds[places[0]]["metadata"]["mailbox"].get("subscriptionId")
        if reject:
            payload["reject"] = [{"offset": offset} for offset in offsets]
        else:
            payload["offsets"] = offsets
        self.commits[self.actor.write("hub:mailbox_commit", payload, pattern="ask")] = places

    # -- listening -------------------------------------------------------------------------------------

    def listen(self) -> None:
        if self.actor is not None:
            for frame in self.actor.quiet():
                self.take(frame)

    def take(self, frame: Frame) -> None:
        if frame["type"] == "n":
            self._message(frame)
            return
        sent = self.waiting.get(frame["correlationId"])
        if sent is not None:
            del self.waiting[frame["correlationId"]]
            self._answer(sent, frame)
        places = self.commits.pop(frame["correlationId"], None)
        if places is not None:
            assert frame["type"] == "hub:mailbox_committed", frame
            for place in places:
                self.holds.pop(place, None)
                assert self.book.done.setdefault(place, self.address) == self.address, "one of a group"

    def _answer(self, sent: Sent, frame: Frame) -> None:
        payload = frame["payload"]
        if frame["type"] in ("hub:delivery_ack", "hub:published"):
            assert frame["type"] == "hub:published" or payload["status"] == "accepted", frame
            self.book.accepted.add(sent.number)
        elif payload["code"] == "timeout":
            assert payload["details"]["outcome"] == "unknown"
            self.book.unknown.add(sent.number)
        else:
            assert payload["code"] in ("unknown_actor", "message_expired"), frame
            self.book.refused.add(sent.number)

    def _message(self, frame: Frame) -> None:
        book, number, metadata = self.book, frame["payload"], frame["metadata"]
        sender, to = book.sent[number]
        assert frame["from"] == sender, "nobody speaks as somebody else"
        assert frame["to"] == self.address
        assert to in (self.address, TOPIC), "nobody hears what was not for them"
        place = (metadata["mailbox"]["stream"], metadata["mailbox"]["offset"])
        assert place not in book.done, "what is committed does not come again"
        self.holds[place] = frame
        if to != TOPIC:
            assert number > self.last_from.get(sender, 0), "in order on each connection"
            self.last_from[sender] = number
        known = book.heard[self.address if to != TOPIC else TOPIC]
        if number in known:
            assert metadata.get("redelivered"), f"whoever may have heard {number} is told so"
            return
        if to != TOPIC and not metadata.get("redelivered"):
            # A message that was lost with a connection may come again after a crash, marked as redelivered,
            # when later ones were heard already.
            assert all(one < number for one in known if book.sent[one][0] == sender), "in order"
        known.append(number)
