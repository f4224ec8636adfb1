"""A bare HTTP client that tells "certainly not done" from "perhaps done"."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote

import orjson

from tailrace.protocol import offsets

JSON = {"Content-Type": "application/json"}
TEXT = {"Content-Type": "text/plain"}


class LostError(Exception):
    """The connection broke: the request may have taken effect, or not."""


class NotSentError(LostError):
    """Nobody listened: it certainly did not take effect."""


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def entry(self) -> int:
        """The entry number of `Stream-Next-Offset`."""
        return offsets.parse_offset(self.headers["stream-next-offset"])[1]

    @property
    def closed(self) -> bool:
        return "stream-closed" in self.headers

    @property
    def code(self) -> str:
        """The code of our one error shape; fails if the answer has another."""
        assert self.headers["content-type"] == "application/json; charset=utf-8", self
        error = orjson.loads(self.body)["error"]
        assert isinstance(error["message"], str), self
        return str(error["code"])


class Content(NamedTuple):
    """A whole stream as readers see it."""

    entries: list[bytes]
    closed: bool
    tail: str


class Wire:
    """One keep-alive connection, opened again when it breaks."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: http.client.HTTPConnection | None = None

    def send(
        self,
        method: str,
        name: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        query: str = "",
    ) -> Answer:
        """One request to a stream."""
        return self.send_path(method, f"/v1/stream/{quote(name)}{query}", body, headers)

    def send_path(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        connection = self._connection
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
            try:
                connection.connect()
            except OSError as error:
                raise NotSentError from error
            self._connection = connection
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            answer = Answer(response.status, found, response.read())
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise LostError from error
        if response.will_close:
            self.close()
        return answer

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def read_all(self, name: str) -> Content | Answer:
        """Every entry of a stream, page by page; the refusal if it cannot be read.

        Text streams are cut at line ends: their writers end each entry with one.
        """
        entries: list[bytes] = []
        offset = "-1"
        while True:
            answer = self.send("GET", name, query=f"?offset={offset}")
            if answer.status != 200:
                return answer
            if answer.headers["content-type"].startswith("application/json"):
                entries.extend(orjson.dumps(message) for message in orjson.loads(answer.body))
            else:
                entries.extend(answer.body.splitlines(keepends=True))
            offset = answer.headers["stream-next-offset"]
            if "stream-up-to-date" in answer.headers:
                return Content(entries, answer.closed, offset)
