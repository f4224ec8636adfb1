"""The server's API as used by the source and the sink: blocking requests with retries.

A process has one shared client per connection.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx2
import msgspec

import tailrace
from tailrace.client import transport, wire
from tailrace.client.errors import ClientError
from tailrace.client.model import StreamDescriptor, StreamInfo
from tailrace.client.transport import Backoff, Retries, SyncTransport, exchange
from tailrace.spark.object_stores import ProcessCache
from tailrace.spark.options import Connection

LIST_PAGE = 1000
CLIENTS_MAX = 8
MISSING_STREAM_STATUSES = (404, 410)


class RowPage(msgspec.Struct, frozen=True):
    """A page of rows: an Arrow IPC stream, and the offset of the next page."""

    body: bytes
    next_offset: str
    end_offset: str
    up_to_date: bool


class StreamLocation(msgspec.Struct, frozen=True):
    """The location of a stream in the object store."""

    stream_id: str
    earliest: int = 0


class _PlanStream(msgspec.Struct):
    stream: str
    stream_id: str
    earliest: int = 0


class _Plan(msgspec.Struct):
    store: str
    streams: list[_PlanStream]


_plan_decoder = msgspec.json.Decoder(_Plan)


class ServerClient:
    """Requests to one server. Safe to share between the threads of a process; never pickled."""

    def __init__(self, connection: Connection, purpose: str = "") -> None:
        self._retries = Retries(
            attempts_max=connection.retries + 1, elapsed_s_max=connection.timeout_s * (connection.retries + 1)
        )
        # Loading certificates takes time, and plain HTTP does not need them.
        verify: ssl.SSLContext | bool = connection.endpoint.startswith("https://")
        if connection.ca_file is not None:
            verify = ssl.create_default_context(cafile=connection.ca_file)
        agent = f"tailrace-spark/{tailrace.__version__}" + (f" {purpose}" if purpose else "")
        self._http = httpx2.Client(
            limits=transport.pool_limits(), verify=verify, headers={"User-Agent": agent}
        )
        settings = transport.make_settings(
            connection.endpoint,
            token=_token_source(connection),
            timeout_s=connection.timeout_s,
            connect_timeout_s=min(connection.timeout_s, 10.0),
            retries=self._retries,
        )
        self._port = SyncTransport(self._http, settings)

    def close(self) -> None:
        self._http.close()

    def send(self, request: wire.HttpRequest) -> wire.HttpResponse:
        return self._port.run(exchange(request, Backoff(self._retries))).response

    # -- streams ---------------------------------------------------------------------------------------

    def head(self, name: str) -> StreamInfo | None:
        """The stream's metadata; None if it does not exist."""
        response = self.send(wire.head(name))
        if response.status in MISSING_STREAM_STATUSES:
            return None
        wire.check_status(response, 200)
        return wire.parse_info(name, response)

    def create(self, name: str, content_type: str) -> None:
        request = wire.create(name, content_type=content_type, lifetime={}, closed=False, body=b"")
        response = self.send(request)
        if response.status != 409:  # created concurrently, with another configuration
            wire.check_status(response, 200, 201)

    def list_streams(self, prefix: str, *, system: bool = False) -> Iterator[StreamDescriptor]:
        """All streams whose names start with the prefix, page by page."""
        after = ""
        while True:
            response = self.send(
                wire.list_streams(prefix=prefix, after=after, limit=LIST_PAGE, system=system)
            )
            wire.check_status(response, 200)
            rows, more = wire.parse_list(response)
            yield from rows
            if not more or not rows:
                return
            after = rows[-1].name

    def get_registry(self, name: str) -> bytes | None:
        """The stream's schema registry as JSON; None if it has none."""
        response = self.send(wire.HttpRequest(method="GET", path=f"{wire.stream_path(name)}/_schema"))
        if response.status in MISSING_STREAM_STATUSES:
            return None
        wire.check_status(response, 200)
        return response.body

    def locate(self, name: str) -> tuple[str, StreamLocation] | None:
        """The object store's URL and the stream's location in it; None if the server does not disclose it.

        Only tokens with the scope to manage the server get it. Others read the same entries from the server.
        """
        path = f"/v1/pipeline/plan?{urlencode({'stream': name, 'limit': 1})}"
        response = self.send(wire.HttpRequest(method="GET", path=path))
        if response.status != 200:
            return None
        plan = _plan_decoder.decode(response.body)
        found = next((one for one in plan.streams if one.stream == name), None)
        return None if found is None else (plan.store, StreamLocation(found.stream_id, found.earliest))

    # -- entries ---------------------------------------------------------------------------------------

    def rows(
        self,
        name: str,
        *,
        offset: str | None = None,
        since_ns: int | None = None,
        key: str | None = None,
        entries_max: int | None = None,
        bytes_max: int | None = None,
        wait_ms: int | None = None,
    ) -> RowPage:
        """One page of rows. `wait_ms` makes it a long-poll: an empty page returns after that time."""
        path = wire.stream_path(name) + (f"/pk/{quote(key, safe='')}" if key is not None else "")
        parameters: dict[str, Any] = {"format": "arrow"}
        if offset is not None:
            parameters["offset"] = offset
        if since_ns is not None:
            parameters["since"] = max(0, since_ns)
        if entries_max is not None:
            parameters["max_entries"] = entries_max
        if bytes_max is not None:
            parameters["max_bytes"] = bytes_max
        if wait_ms is not None:
            parameters |= {"live": "long-poll", "timeout_ms": wait_ms}
        request = wire.HttpRequest(method="GET", path=f"{path}?{urlencode(parameters)}")
        response = self.send(request)
        wire.check_status(response, 200, 204)
        return RowPage(
            response.body,
            wire.required_header(response, "stream-next-offset"),
            wire.required_header(response, "stream-end-offset"),
            response.headers.get("stream-up-to-date", "") == "true",
        )

    def append(
        self, name: str, body: bytes, content_type: str, key: str | None, producing: wire.ProducerFields
    ) -> bool:
        """One idempotent append. Returns False if the server has it already."""
        request = wire.append(name, body, content_type=content_type, key=key, producing=producing)
        response = self.send(request)
        wire.check_status(response, 200, 204)
        return response.status == 200

    def get(self, path: str) -> Any:
        """The decoded JSON response of a GET request."""
        response = self.send(wire.HttpRequest(method="GET", path=path))
        wire.check_status(response, 200)
        return msgspec.json.decode(response.body)


def _token_source(connection: Connection) -> Any:
    """A token, or a function that reads it: a token file is read for each request, because tokens rotate."""
    if connection.token_file is not None:
        path = Path(connection.token_file)
        return lambda: path.read_text(encoding="utf-8").strip()
    return connection.token


CLIENTS: ProcessCache[tuple[Connection, str], ServerClient] = ProcessCache(
    lambda key: ServerClient(*key), CLIENTS_MAX
)


def shared_client(connection: Connection, purpose: str = "") -> ServerClient:
    """The client of this process: tasks share its connections."""
    return CLIENTS.get((connection, purpose))


def is_gone(error: ClientError) -> bool:
    """Whether the requested entries no longer exist."""
    return error.status in MISSING_STREAM_STATUSES
