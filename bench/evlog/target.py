# pyright: strict
"""One server with a stream of events: set up, filled, asked."""

from __future__ import annotations

import http.client
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import orjson

from bench.peers import Peer
from bench.processes import PeerError, Running

STREAM = "events"
ANSWER_S_MAX = 15.0
APPEND_S_MAX = 120.0

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: Json
    seconds: float

    @property
    def timed_out(self) -> bool:
        return self.status in (0, 408) or bool(self.body.get("timed_out"))

    @property
    def complete(self) -> bool:
        """Whether the server says that it has looked at everything."""
        coverage = self.body.get("coverage")
        whole = not isinstance(coverage, dict) or cast("Json", coverage).get("complete") is not False
        return self.status == 200 and whole and not self.timed_out


class Target:
    """Requests go one after the other over one connection."""

    def __init__(self, peer: Peer, server: Running) -> None:
        self.peer = peer
        self.server = server
        self._connection: http.client.HTTPConnection | None = None

    def call(
        self, method: str, path: str, body: bytes | None = None, patience_s: float = ANSWER_S_MAX
    ) -> Answer:
        """Status 0 stands for no answer in time."""
        connection = self._connection or http.client.HTTPConnection("127.0.0.1", self.server.port)
        self._connection = connection
        connection.timeout = patience_s
        if connection.sock is not None:
            connection.sock.settimeout(patience_s)
        headers = {} if body is None else {"content-type": "application/json"}
        begun = time.perf_counter()
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            payload = answer.read()
        except (OSError, http.client.HTTPException):
            self._connection = None
            connection.close()
            return Answer(0, {}, time.perf_counter() - begun)
        seconds = time.perf_counter() - begun
        if answer.will_close:
            self._connection = None
        return Answer(answer.status, _object(payload), seconds)

    def must(self, method: str, path: str, body: object = None) -> Answer:
        answer = self.call(method, path, None if body is None else orjson.dumps(body))
        if not 200 <= answer.status < 300:
            raise PeerError(f"{method} {path} was answered with {answer.status}: {str(answer.body)[:300]}")
        return answer

    def set_up(self, search: Json | None) -> None:
        """The stream with its profile. `search` replaces what the profile brings to be searched."""
        self.must("PUT", f"/v1/stream/{STREAM}", [])
        profile = {"apiVersion": "durable.streams/profile/v1", "profile": {"kind": "evlog"}}
        self.must("POST", f"/v1/stream/{STREAM}/_profile", profile)
        if search is not None:
            self.must("POST", f"/v1/stream/{STREAM}/_schema", {"search": search})

    def append(self, body: bytes) -> Answer:
        """Tries again while the server is overloaded: what counts is the time until it is done."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            answer = self.call("POST", f"/v1/stream/{STREAM}", body, APPEND_S_MAX)
            if 200 <= answer.status < 300:
                return answer
            if answer.status not in (429, 503):
                raise PeerError(f"an append was answered with {answer.status}: {str(answer.body)[:300]}")
            time.sleep(0.05)
        raise PeerError("overloaded for two minutes")

    def search(self, body: Json) -> Answer:
        return self.call("POST", f"/v1/stream/{STREAM}/_search", orjson.dumps(body))

    def aggregate(self, body: Json) -> Answer:
        return self.call("POST", f"/v1/stream/{STREAM}/_aggregate", orjson.dumps(body))

    def settle(self, patience_s: float) -> float:
        """Waits until what the server indexes in the background no longer grows; answers the seconds."""
        begun = time.monotonic()
        last, since, cpu = b"", begun, self.server.cpu_seconds()
        while time.monotonic() - begun < patience_s:
            status = self.must("GET", f"/v1/stream/{STREAM}/_index_status").body
            shown = orjson.dumps(_without_ages(status), option=orjson.OPT_SORT_KEYS)
            now, used = time.monotonic(), self.server.cpu_seconds()
            busy = used - cpu > 0.3
            cpu = used
            if shown != last or busy:
                last, since = shown, now
            elif now - since > 6.0:
                break
            time.sleep(1.0)
        return time.monotonic() - begun

    def bytes_at_rest(self, directory: Path) -> int:
        files = (path for path in (directory / "data").rglob("*") if path.is_file() and not path.is_symlink())
        return sum(path.stat().st_blocks * 512 for path in files)


def _without_ages(value: object) -> object:
    if isinstance(value, dict):
        items = cast("Json", value).items()
        return {key: _without_ages(item) for key, item in items if key != "lag_ms"}
    if isinstance(value, list):
        return [_without_ages(item) for item in cast("list[object]", value)]
    return value


def _object(payload: bytes) -> Json:
    try:
        found: object = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return {}
    return cast("Json", found) if isinstance(found, dict) else {}
