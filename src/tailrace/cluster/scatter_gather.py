"""Responses about the whole server: sends the request to every worker and merges the responses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from heapq import merge
from itertools import islice
from typing import Any, Final, cast
from urllib.parse import urlencode

import orjson

from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.http.exchange import Exchange
from tailrace.http.relay import ALONE_HEADER, RELAY_HEADERS, PeerClient
from tailrace.protocol.http_headers import header_line
from tailrace.protocol.query_params import parse_query
from tailrace.routing import responses
from tailrace.server.server_details import DETAILS_PATH, MEMORY_PATH, SEAL_PATH

STREAMS_PATH: Final = b"/v1/streams"
METRICS_PATH, READY_PATH = b"/metrics", b"/readyz"
PEER_METRICS_PATH: Final = b"/_worker/metrics"
METRICS_TYPE: Final = b"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
WORKER_UP_METRIC: Final = (
    "# HELP tailrace_worker_up 1 while the worker answers, else 0.\n# TYPE tailrace_worker_up gauge\n"
)
_FRAMING: Final = {b"host", b"connection", b"upgrade", b"expect", b"content-length", b"transfer-encoding"}
_DROPPED_HEADERS: Final = RELAY_HEADERS | _FRAMING
UNMERGED_KEYS: Final = frozenset({"configured_limits", "auto_tune"})
MAXIMUM_KEYS: Final = frozenset({"oldest_ms", "last_publish_at"})

PeerResponse = tuple[int, bytes]  # status and body


class ScatterGather:
    """Sends requests to all workers over their sockets, including this one."""

    def __init__(self, peers: Mapping[int, PeerClient], limits: Limits, deployment: str) -> None:
        self._peers = peers
        self._limits = limits
        self._deployment = deployment
        self.handlers = {
            STREAMS_PATH: self._streams,
            METRICS_PATH: self._metrics,
            READY_PATH: self._ready,
            DETAILS_PATH: self._respond_merged,
            MEMORY_PATH: self._respond_merged,
            SEAL_PATH: self._seal,
        }

    def handles(self, exchange: Exchange) -> bool:
        """Whether to merge the responses of all workers; other methods are refused by this one."""
        methods = (b"POST",) if exchange.path == SEAL_PATH else (b"GET", b"HEAD")
        return exchange.path in self.handlers and exchange.method in methods

    async def respond(self, exchange: Exchange) -> None:
        await self.handlers[exchange.path](exchange)

    async def respond_public(self, exchange: Exchange) -> None:
        """For the metrics listener, without authentication."""
        if exchange.path == METRICS_PATH:
            await self._metrics(exchange, PEER_METRICS_PATH)
        else:
            await self._ready(exchange)

    # -- requests ----------------------------------------------------------------------------------------

    async def _request(
        self, exchange: Exchange, peer: PeerClient, query: str | None = None, path: bytes | None = None
    ) -> PeerResponse | None:
        """None if the worker does not respond."""
        headers = tuple(item for item in exchange.headers.items() if item[0] not in _DROPPED_HEADERS)
        text = exchange.query.decode("latin-1") if query is None else query
        target = (path or exchange.path).decode("latin-1") + (f"?{text}" if text else "")
        method = "POST" if exchange.method == b"POST" else "GET"
        try:
            return await peer.ask(method, target, headers=(*headers, (ALONE_HEADER, b"1")))
        except TailraceError:
            return None

    async def _request_all(self, exchange: Exchange, path: bytes | None = None) -> list[PeerResponse | None]:
        return await asyncio.gather(
            *(self._request(exchange, peer, None, path) for peer in self._peers.values())
        )

    async def _require_all(self, exchange: Exchange) -> list[bytes] | None:
        """The bodies of all workers. None if one refused: its error was sent as the response."""
        parts = await self._request_all(exchange)
        for number, part in zip(self._peers, parts, strict=True):
            if part is None:
                raise TailraceError("unavailable", f"worker {number} does not respond")
        found = [part for part in parts if part is not None]
        refused = next((part for part in found if part[0] != 200), None)
        if refused is not None:
            exchange.respond(refused[0], responses.JSON_TYPE + responses.NO_STORE, refused[1])
            return None
        return [body for _, body in found]

    # -- the routes --------------------------------------------------------------------------------------

    async def _streams(self, exchange: Exchange) -> None:
        bodies = await self._require_all(exchange)
        if bodies is None:
            return
        query = parse_query(exchange.query)
        limit = int(query.get("limit", self._limits.list_page))  # checked by each worker
        pages = [cast("list[dict[str, Any]]", orjson.loads(body)) for body in bodies]
        found = list(islice(merge(*pages, key=lambda one: one["name"]), limit))
        following = {"limit": str(limit), "after": found[-1]["name"] if found else ""}
        following.update({name: query[name] for name in ("prefix", "system") if name in query})
        more = sum(map(len, pages)) > limit
        whole = [index for index, page in enumerate(pages) if len(page) == limit]
        if not more and whole:
            # All of them are from one worker, which may have more.
            query_more = urlencode({**following, "limit": "1"})
            probe = await self._request(exchange, self._peers[whole[0]], query_more)
            more = probe is not None and probe[0] == 200 and bool(orjson.loads(probe[1]))
        head = responses.JSON_TYPE + responses.NO_STORE
        if more:
            head += header_line("Link", f'</v1/streams?{urlencode(following)}>; rel="next"')
        exchange.respond(200, head, orjson.dumps(found))

    async def _metrics(self, exchange: Exchange, path: bytes | None = None) -> None:
        parts = await self._request_all(exchange, path)
        refused = next((part for part in parts if part is not None and part[0] != 200), None)
        if refused is not None:
            exchange.respond(refused[0], responses.JSON_TYPE + responses.NO_STORE, refused[1])
            return
        texts = {
            number: part[1].decode()
            for number, part in zip(self._peers, parts, strict=True)
            if part is not None
        }
        up = "".join(
            f'tailrace_worker_up{{worker="{number}"}} {int(number in texts)}\n' for number in self._peers
        )
        body = (merge_metrics(texts) + WORKER_UP_METRIC + up).encode()
        exchange.respond(200, METRICS_TYPE + responses.NO_STORE, body)

    async def _ready(self, exchange: Exchange) -> None:
        parts = await self._request_all(exchange)
        workers: list[object] = []
        unready = ""
        for number, part in zip(self._peers, parts, strict=True):
            status: dict[str, Any] = {"status": "down"} if part is None else orjson.loads(part[1])
            workers.append({"worker": number, **status})
            if (part is None or part[0] != 200) and not unready:
                unready = f"worker {number}: {status.get('reason') or 'does not respond'}"
        head = responses.JSON_TYPE + responses.NO_STORE
        if not unready:
            ready = {"status": "ready", "deployment": self._deployment, "workers": workers}
            exchange.respond(200, head, orjson.dumps(ready))
            return
        degraded = {"status": "degraded", "reason": unready, "workers": workers}
        exchange.respond(503, head + b"Retry-After: 5\r\n", orjson.dumps(degraded))

    async def _respond_merged(self, exchange: Exchange) -> None:
        bodies = await self._require_all(exchange)
        if bodies is not None:
            parts = [cast("dict[str, Any]", orjson.loads(body)) for body in bodies]
            body = orjson.dumps({**merge_json(parts), "workers": parts})
            exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, body)

    async def _seal(self, exchange: Exchange) -> None:
        parts = await self._request_all(exchange)
        worst = max(parts, key=lambda part: 1000 if part is None else part[0])
        if worst is None:
            raise TailraceError("unavailable", "a worker does not respond; the others may have sealed")
        exchange.respond(worst[0], responses.JSON_TYPE + responses.NO_STORE, worst[1])


def merge_metrics(texts: Mapping[int, str]) -> str:
    """Merge the metrics of all workers by family; samples get a `worker` label."""
    families: dict[str, list[str]] = {}
    for number, text in texts.items():
        lines: list[str] = []
        is_new = False
        for text_line in text.splitlines():
            if text_line.startswith("# HELP "):
                name = text_line.split(" ", 3)[2]
                lines = families.setdefault(name, [])
                is_new = not lines
            if text_line.startswith("#"):
                if is_new:
                    lines.append(text_line)
            elif text_line:
                lines.append(_with_label(text_line, number))
    return "".join(f"{text_line}\n" for lines in families.values() for text_line in lines)


def _with_label(sample: str, number: int) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{worker="{number}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{worker="{number}"}} {value}'


def merge_json(parts: Sequence[Any]) -> Any:
    """Add up numbers (also those written as strings), join lists, and use the first value of all else.

    Settings are equal on all workers and not added up. Of ages and timestamps the maximum is used.
    """
    first = parts[0]
    if isinstance(first, dict):
        keys = cast("dict[str, Any]", first)
        found = [cast("dict[str, Any]", part) for part in parts]
        return {key: _merge_values(key, [part[key] for part in found if key in part]) for key in keys}
    if isinstance(first, bool):
        return any(parts)
    if isinstance(first, int | float):
        return sum(part for part in parts if isinstance(part, int | float))
    if isinstance(first, str) and all(isinstance(part, str) and _is_number(part) for part in parts):
        return str(sum(map(int, parts)))
    if isinstance(first, list):
        return [item for part in parts for item in cast("list[Any]", part or [])]
    return first


def _merge_values(key: str, values: list[Any]) -> Any:
    if key in UNMERGED_KEYS:
        return values[0]
    if key in MAXIMUM_KEYS:
        present = [value for value in values if value is not None]
        return max(present, key=_rank, default=None)
    return merge_json(values)


def _rank(value: Any) -> tuple[int, str]:
    text = str(value)
    return len(text) if _is_number(text) else 0, text


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
