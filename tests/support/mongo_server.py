"""A stand-in for a MongoDB replica set: it speaks the wire protocol, so that the real driver can be used."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import bson
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

from support.mongo_store import ChangeStream, Document, MongoStore, Records, Refusal
from support.ports import KeptPort

OP_REPLY, OP_QUERY, OP_MSG = 1, 2004, 2013
MORE_TO_COME = 2
FIRST_BATCH = 101
BATCH_BYTES = 16 * 1024 * 1024
SET = "tailrace-test"


class Find:
    """A cursor over a collection in the order of its places; it sees what is written meanwhile behind it."""

    ended = False

    def __init__(self, records: Records | None) -> None:
        self._records = records
        self._after = -1

    def batch(self, size: int) -> list[Document]:
        found: list[Document] = []
        rows = {} if self._records is None else self._records.rows
        for place in [place for place in rows if place > self._after][: size or FIRST_BATCH]:
            found.append(rows[place])
            self._after = place
        self.ended = all(place <= self._after for place in rows)
        return found


class MongoServer:
    """Listens on a port of its own. What it has outlives a crash; its connections and cursors do not."""

    def __init__(self, store: MongoStore | None = None, *, wire: int = 21, replicates: bool = True) -> None:
        self.store = store or MongoStore()
        self._kept = KeptPort()
        self.port = self._kept.number
        self.wire = wire  # 21: MongoDB 7.0, 17: 6.0, 9: 4.4
        self._replicates = replicates
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self._cursors: dict[int, tuple[str, ChangeStream | Find]] = {}
        self._numbers = itertools.count(1000)
        self._failures: list[tuple[str, Refusal]] = []
        self.commands: list[Document] = []  # all that was asked for, the driver's own included

    @property
    def dsn(self) -> str:
        return f"mongodb://127.0.0.1:{self.port}/"

    # -- life ------------------------------------------------------------------------------------------

    def start(self) -> MongoServer:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return self

    def crash(self) -> None:
        listener, self._listener = self._listener, None
        assert listener is not None
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        self.cut()
        with self.store.lock:
            self._cursors.clear()

    def cut(self) -> None:
        """Breaks all connections; the cursors are still there."""
        with self.store.lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def fail_next(self, command: str, refusal: Refusal) -> None:
        with self.store.lock:
            self._failures.append((command, refusal))

    # -- the wire --------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self.store.lock:
                if self._listener is not listener:
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as incoming:
                while len(head := incoming.read(16)) == 16:
                    length, request, _, opcode = struct.unpack("<iiii", head)
                    body = incoming.read(length - 16)
                    if len(body) < length - 16:
                        return
                    if (answer := self._answered(opcode, request, body)) is not None:
                        connection.sendall(answer)
        except OSError:
            return
        finally:
            with self.store.lock:
                self._connections.discard(connection)

    def _answered(self, opcode: int, request: int, body: bytes) -> bytes | None:
        if opcode == OP_QUERY:  # how a driver says hello before it knows whom to
            begin = body.index(b"\0", 4) + 9
            answer = bson.encode(self._run(bson.decode(body[begin:])))
            reply = struct.pack("<iqii", 8, 0, 0, 1) + answer
            return struct.pack("<iiii", 16 + len(reply), 0, request, OP_REPLY) + reply
        assert opcode == OP_MSG, opcode
        (flags,) = struct.unpack_from("<I", body)
        answer = bson.encode(self._run(_sections(body[4:])))
        if flags & MORE_TO_COME:
            return None
        reply = struct.pack("<IB", 0, 0) + answer
        return struct.pack("<iiii", 16 + len(reply), 0, request, OP_MSG) + reply

    # -- commands --------------------------------------------------------------------------------------

    def _run(self, command: Document) -> Document:
        name = next(iter(command))
        runs: dict[str, Callable[[Document], Document]] = {
            "hello": self._hello,
            "ismaster": self._hello,
            "isMaster": self._hello,
            "ping": lambda _: {},
            "endSessions": lambda _: {},
            "listCollections": self._list_collections,
            "aggregate": self._aggregate,
            "find": self._find,
            "getMore": self._get_more,
            "killCursors": self._kill_cursors,
            "saslStart": _not_authenticated,
        }
        with self.store.lock:
            self.commands.append(command)
            try:
                self._fail(name)
                if name not in runs:
                    raise Refusal(59, "CommandNotFound", f"no such command: '{name}'")
                answer = {**runs[name](command), "ok": 1.0}
            except Refusal as refusal:
                answer = dict(refusal.answer)
            if self._replicates:
                last = self.store.last
                answer |= {"$clusterTime": _signed(last), "operationTime": last}
            return answer

    def _fail(self, name: str) -> None:
        for failure in self._failures:
            if failure[0] == name:
                self._failures.remove(failure)
                raise failure[1]

    def _hello(self, command: Document) -> Document:
        host = f"127.0.0.1:{self.port}"
        answer: Document = {
            "helloOk": True,
            "maxBsonObjectSize": BATCH_BYTES,
            "maxMessageSizeBytes": 48_000_000,
            "maxWriteBatchSize": 100_000,
            "logicalSessionTimeoutMinutes": 30,
            "minWireVersion": 0,
            "maxWireVersion": self.wire,
            "readOnly": False,
        }
        answer["ismaster" if "hello" not in command else "isWritablePrimary"] = True
        if self._replicates:
            answer |= {"setName": SET, "hosts": [host], "primary": host, "me": host, "setVersion": 1}
        return answer

    def _list_collections(self, command: Document) -> Document:
        wanted = command.get("filter", {}).get("name")
        database = command["$db"]
        names = [name.partition(".")[2] for name in self.store.collections if name.startswith(f"{database}.")]
        found = [{"name": one, "type": "collection"} for one in names if wanted in (None, one)]
        return _cursor(0, f"{database}.$cmd.listCollections", found, first=True)

    def _aggregate(self, command: Document) -> Document:
        if not self._replicates:
            message = "The $changeStream stage is only supported on replica sets"
            raise Refusal(40573, "Location40573", message)
        namespace = f"{command['$db']}.{command['aggregate']}"
        options = command["pipeline"][0]["$changeStream"]
        stream = ChangeStream(self.store, namespace, options, images=self.wire >= 17)
        return self._opened(namespace, stream, command.get("cursor", {}).get("batchSize", FIRST_BATCH))

    def _find(self, command: Document) -> Document:
        namespace = f"{command['$db']}.{command['find']}"
        cursor = Find(self.store.collections.get(namespace))
        return self._opened(namespace, cursor, command.get("batchSize", FIRST_BATCH))

    def _opened(self, namespace: str, cursor: ChangeStream | Find, size: int) -> Document:
        number = next(self._numbers)
        self._cursors[number] = (namespace, cursor)
        found = cursor.batch(size) if size else []
        return self._given(number, namespace, cursor, found, first=True)

    def _get_more(self, command: Document) -> Document:
        number = int(command["getMore"])
        if number not in self._cursors:
            raise Refusal(43, "CursorNotFound", f"cursor id {number} not found", "ResumableChangeStreamError")
        namespace, cursor = self._cursors[number]
        size = int(command.get("batchSize", 0)) or 2**31
        found = cursor.batch(size)
        if not found and not cursor.ended and isinstance(cursor, ChangeStream):
            deadline = time.monotonic() + int(command.get("maxTimeMS", 1000)) / 1000
            while not found and (rest_s := deadline - time.monotonic()) > 0:
                self.store.news.wait(rest_s)  # others may write meanwhile
                found = cursor.batch(size)
        return self._given(number, namespace, cursor, found, first=False)

    def _given(
        self, number: int, namespace: str, cursor: ChangeStream | Find, found: list[Document], *, first: bool
    ) -> Document:
        if cursor.ended:
            self._cursors.pop(number, None)
            number = 0
        answer = _cursor(number, namespace, found, first=first)
        if isinstance(cursor, ChangeStream):
            answer["cursor"]["postBatchResumeToken"] = {"_data": cursor.token}
        return answer

    def _kill_cursors(self, command: Document) -> Document:
        killed = [one for one in command["cursors"] if self._cursors.pop(int(one), None) is not None]
        return {"cursorsKilled": killed, "cursorsNotFound": [], "cursorsAlive": [], "cursorsUnknown": []}


def _sections(body: bytes) -> Document:
    """The command; what it has in sequences is put into it."""
    command: Document = {}
    at = 0
    while at < len(body):
        kind, at = body[at], at + 1
        (size,) = struct.unpack_from("<i", body, at)
        if kind == 0:
            command |= bson.decode(body[at : at + size])
        else:
            end = body.index(b"\0", at + 4)
            rows = cast("list[Any]", bson.decode_all(body[end + 1 : at + size]))
            command[body[at + 4 : end].decode()] = rows
        at += size
    return command


def _cursor(number: int, namespace: str, found: list[Document], *, first: bool) -> Document:
    batch = "firstBatch" if first else "nextBatch"
    packed = [RawBSONDocument(bson.encode(one)) for one in found]
    return {"cursor": {"id": Int64(number), "ns": namespace, batch: packed}}


def _signed(last: Timestamp) -> Document:
    return {"clusterTime": last, "signature": {"hash": bytes(20), "keyId": Int64(0)}}


def _not_authenticated(_: Document) -> Document:
    raise Refusal(18, "AuthenticationFailed", "Authentication failed.")
