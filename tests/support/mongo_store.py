"""What a MongoDB replica set has: collections, an oplog of bounded length, and change streams over it.

Not MongoDB: a stand-in for tests, written from its public documentation, for no server can be had from where
this project gets its packages. Everything is committed by the majority as soon as it is written.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

import bson
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

Document = dict[str, Any]
INVALIDATE = "FE"  # behind the token of what has ended a stream
EVENTS = ("insert", "update", "replace", "delete")


class Refusal(Exception):  # noqa: N818 - what a server answers, not what goes wrong here
    """An error as a command answers it."""

    def __init__(self, code: int, name: str, message: str, *labels: str) -> None:
        super().__init__(message)
        self.answer: Document = {"ok": 0.0, "errmsg": message, "code": code, "codeName": name}
        if labels:
            self.answer["errorLabels"] = list(labels)


def history_lost() -> Refusal:
    message = "Resume of change stream was not possible, as the resume point may no longer be in the oplog."
    return Refusal(286, "ChangeStreamHistoryLost", message, "NonResumableChangeStreamError")


class Entry(NamedTuple):
    """One operation of the oplog. Those of a transaction have one time and are told apart by their number."""

    time: Timestamp
    number: int
    op: str  # one of EVENTS, or drop, rename, noop
    namespace: str
    unique: uuid.UUID | None = None  # of the collection, which a new one of the same name does not have
    key: Document | None = None
    full: Document | None = None
    before: Document | None = None
    changed: Document | None = None
    session: tuple[Document, int] | None = None
    to: str | None = None
    wall: datetime | None = None

    @property
    def token(self) -> str:
        """Begins as MongoDB's do; what follows is ours."""
        unique = "" if self.unique is None else self.unique.hex
        key = "" if self.key is None else bson.encode(self.key).hex()
        return f"82{time_hex(self.time)}2B022C{self.number:04X}296E5A1004{unique}46{key}04"


def time_hex(time: Timestamp) -> str:
    return f"{time.time:08X}{time.inc:08X}"


def high_water(time: Timestamp) -> str:
    """A token that is but a time: it stands before whatever happened then."""
    return f"82{time_hex(time)}2B0229296E04"


class Records:
    """A collection. A document keeps its place until it is deleted."""

    def __init__(self) -> None:
        self.unique = uuid.uuid4()
        self.rows: dict[int, Document] = {}
        self.places: dict[bytes, int] = {}
        self.keeps_before = False
        self._next = 0

    def find(self, key: Any) -> Document | None:
        place = self.places.get(bson.encode({"_id": key}))
        return None if place is None else self.rows[place]

    def put(self, document: Document) -> None:
        packed = bson.encode({"_id": document["_id"]})
        if packed not in self.places:
            self.places[packed] = self._next
            self._next += 1
        self.rows[self.places[packed]] = document

    def remove(self, key: Any) -> None:
        del self.rows[self.places.pop(bson.encode({"_id": key}))]


class Writes:
    """Writes that are seen together. Those of a session's transaction have one time as well."""

    def __init__(self, store: MongoStore, session: tuple[Document, int] | None) -> None:
        self._store = store
        self._time = store.tick() if session is not None else None
        self._session = session
        self._index = 0

    def insert(self, namespace: str, document: Document) -> None:
        records = self._store.made(namespace)
        assert records.find(document["_id"]) is None, "the key is taken"
        records.put(document)
        self._log("insert", namespace, records, document["_id"], full=document)

    def update(self, namespace: str, key: Any, **fields: Any) -> None:
        records = self._store.made(namespace)
        before = records.find(key)
        assert before is not None
        records.put({**before, **fields})
        changed = {"updatedFields": fields, "removedFields": [], "truncatedArrays": []}
        self._log("update", namespace, records, key, before=before, changed=changed)

    def replace(self, namespace: str, document: Document) -> None:
        records = self._store.made(namespace)
        before = records.find(document["_id"])
        assert before is not None
        records.put(document)
        self._log("replace", namespace, records, document["_id"], full=document, before=before)

    def delete(self, namespace: str, key: Any) -> None:
        records = self._store.made(namespace)
        before = records.find(key)
        assert before is not None
        records.remove(key)
        self._log("delete", namespace, records, key, before=before)

    def _log(self, op: str, namespace: str, records: Records, key: Any, **more: Any) -> None:
        if not records.keeps_before:
            more["before"] = None
        self._store.log(
            Entry(
                self._time or self._store.tick(),
                self._index,
                op,
                namespace,
                records.unique,
                {"_id": key},
                session=self._session,
                wall=datetime.now(UTC),
                **more,
            )
        )
        self._index += self._time is not None


class MongoStore:
    """Shared by the test, which writes, and the connections of a server, which read."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.news = threading.Condition(self.lock)
        self.collections: dict[str, Records] = {}
        self.oplog: list[Entry] = []
        self.trimmed = 0  # how many of the oplog are gone
        self.last = Timestamp(int(time.time()), 1)
        self.log(Entry(self.last, 0, "noop", ""))
        self._transactions = 0

    # -- writing ---------------------------------------------------------------------------------------

    def tick(self) -> Timestamp:
        now_s = max(int(time.time()), self.last.time)
        self.last = Timestamp(now_s, self.last.inc + 1 if now_s == self.last.time else 1)
        return self.last

    def log(self, entry: Entry) -> None:
        self.oplog.append(entry)

    def made(self, namespace: str) -> Records:
        return self.collections.setdefault(namespace, Records())

    @contextmanager
    def writing(self) -> Iterator[Writes]:
        """One write after the other, none of which is seen before the last: nobody looks in between."""
        with self.lock:
            yield Writes(self, None)
            self.news.notify_all()

    @contextmanager
    def transaction(self) -> Iterator[Writes]:
        """As a session's transaction: its writes have one time."""
        with self.lock:
            self._transactions += 1
            session = {"id": Binary(uuid.uuid4().bytes, 4), "uid": Binary(bytes(32), 0)}
            yield Writes(self, (session, self._transactions))
            self.news.notify_all()

    def insert(self, namespace: str, *documents: Document) -> None:
        with self.lock:
            for document in documents:
                Writes(self, None).insert(namespace, document)
            self.news.notify_all()

    def update(self, namespace: str, key: Any, **fields: Any) -> None:
        with self.writing() as one:
            one.update(namespace, key, **fields)

    def delete(self, namespace: str, key: Any) -> None:
        with self.writing() as one:
            one.delete(namespace, key)

    def drop(self, namespace: str) -> None:
        with self.news:
            records = self.collections.pop(namespace)
            self.log(Entry(self.tick(), 0, "drop", namespace, records.unique))
            self.news.notify_all()

    def rename(self, namespace: str, to: str) -> None:
        """A collection that has the new name is dropped."""
        with self.news:
            records = self.collections.pop(namespace)
            self.collections[to] = records
            self.log(Entry(self.tick(), 0, "rename", namespace, records.unique, to=to))
            self.news.notify_all()

    def noop(self) -> None:
        """As an idle primary writes one from time to time, so that tokens can move."""
        with self.news:
            self.log(Entry(self.tick(), 0, "noop", ""))
            self.news.notify_all()

    def trim(self) -> None:
        """The oplog is full: all that is older than now is thrown away."""
        with self.news:
            self.noop()
            self.trimmed = len(self.oplog) - 1
            self.news.notify_all()

    def documents(self, namespace: str) -> dict[str, Document]:
        """By the text of their ids, which are not part of them."""
        with self.lock:
            rows = list(self.made(namespace).rows.values())
            return {str(one["_id"]): {name: one[name] for name in one if name != "_id"} for one in rows}

    def history(self, namespace: str) -> dict[str, list[str]]:
        """What has happened to each document since the beginning, trimmed or not."""
        found: dict[str, list[str]] = {}
        with self.lock:
            for entry in self.oplog:
                if entry.namespace == namespace and entry.key is not None:
                    found.setdefault(str(entry.key["_id"]), []).append(entry.op)
        return found


class ChangeStream:
    """A cursor over the oplog, for one collection. Called with the store's lock."""

    def __init__(self, store: MongoStore, namespace: str, options: Document, *, images: bool) -> None:
        self._store = store
        self._namespace = namespace
        self._looks_up = options.get("fullDocument") == "updateLookup"
        self._before = images and options.get("fullDocumentBeforeChange") == "whenAvailable"
        self._wall = images
        self._invalidating: Entry | None = None
        self.ended = False
        token = options.get("resumeAfter") or options.get("startAfter")
        if token is not None:
            self.token = str(token["_data"])
            self._place = self._resumed("startAfter" in options)
            return
        started = options.get("startAtOperationTime") or store.last
        # One tick beyond the newest operation, which is not to be told.
        time = started if "startAtOperationTime" in options else Timestamp(started.time, started.inc + 1)
        self.token = high_water(time)
        self._place = self._first_from(time)

    def _resumed(self, after_end: bool) -> int:
        store, token = self._store, self.token
        if not token.startswith("82") or len(token) < 30:
            raise Refusal(260, "InvalidResumeToken", "Invalid resume token")
        time = Timestamp(int(token[2:10], 16), int(token[10:18], 16))
        if store.oplog[store.trimmed].time > time:
            raise history_lost()
        if token == high_water(time):
            return self._first_from(time)
        ends = token.endswith(INVALIDATE)
        if ends and not after_end:
            message = "resumeAfter is not allowed from an invalidate notification"
            raise Refusal(260, "InvalidResumeToken", message)
        for place in range(store.trimmed, len(store.oplog)):
            entry = store.oplog[place]
            if entry.token == token.removesuffix(INVALIDATE):
                self._invalidating = None if ends or entry.op in EVENTS else entry
                return place + 1
        message = "cannot resume stream; the resume token was not found"
        raise Refusal(280, "ChangeStreamFatalError", message, "NonResumableChangeStreamError")

    def _first_from(self, time: Timestamp) -> int:
        store = self._store
        places = range(store.trimmed, len(store.oplog))
        return next((place for place in places if store.oplog[place].time >= time), len(store.oplog))

    def batch(self, size: int) -> list[Document]:
        """What comes next, as far as it is there."""
        found: list[Document] = []
        store = self._store
        if self._place < store.trimmed:
            raise history_lost()
        while len(found) < size and not self.ended:
            if self._invalidating is not None:
                found.append(self._invalidate(self._invalidating))
                break
            if self._place == len(store.oplog):
                break
            entry = store.oplog[self._place]
            self._place += 1
            if self._namespace not in (entry.namespace, entry.to):
                # Read, and not ours; a token that was told is never followed by an older one.
                self.token = max(self.token, high_water(entry.time), key=_order)
                continue
            self.token = entry.token
            found.append(self._event(entry))
            if entry.op not in EVENTS:
                self._invalidating = entry
        return found

    def _invalidate(self, entry: Entry) -> Document:
        self.ended = True
        self.token = f"{entry.token}{INVALIDATE}"
        return {"_id": {"_data": self.token}, "operationType": "invalidate", "clusterTime": entry.time}

    def _event(self, entry: Entry) -> Document:
        database, _, name = entry.namespace.partition(".")
        event: Document = {
            "_id": {"_data": entry.token},
            "operationType": entry.op,
            "clusterTime": entry.time,
            "ns": {"db": database, "coll": name},
        }
        if self._wall and entry.wall is not None:
            event["wallTime"] = entry.wall
        if entry.to is not None:
            database, _, name = entry.to.partition(".")
            event["to"] = {"db": database, "coll": name}
        if entry.session is not None:
            event |= {"lsid": entry.session[0], "txnNumber": Int64(entry.session[1])}
        if entry.key is None:
            return event
        event["documentKey"] = entry.key
        if entry.op in ("insert", "replace"):
            event["fullDocument"] = entry.full
        if entry.op == "update":
            event["updateDescription"] = entry.changed
            if self._looks_up:
                event["fullDocument"] = self._looked_up(entry)
        if self._before and entry.op != "insert":
            event["fullDocumentBeforeChange"] = entry.before
        return event

    def _looked_up(self, entry: Entry) -> Document | None:
        """As it is now, which is later than the change; null if it is gone."""
        records = self._store.collections.get(entry.namespace)
        if records is None or records.unique != entry.unique or entry.key is None:
            return None
        return records.find(entry.key["_id"])


def _order(token: str) -> tuple[str, bool]:
    return token[:18], len(token) > 30
