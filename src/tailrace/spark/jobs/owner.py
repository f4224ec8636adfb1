"""The server as the pipeline sees it: what is to be done, and the publication of what was done.

Every call may be repeated. What the network does is tried again with growing pauses; what the server refuses
is raised as it is.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

import httpx2
import msgspec

from tailrace.spark.jobs.messages import Heartbeat, HeartbeatAnswer, PlanAnswer
from tailrace.storage.segments.index_files import PublishRequest

logger = logging.getLogger("tailrace.pipeline")

T = TypeVar("T")

TIMEOUT_S: Final = 30.0
PAUSE_S_FIRST: Final = 0.2
PAUSE_S_MAX: Final = 5.0
REQUEST_GIVE_UP_S: Final = 120.0
BODY_BYTES_MAX: Final = 1 << 20

_RETRY_STATUSES: Final = frozenset({408, 429, 502, 503, 504})
_NETWORK_ERRORS: Final = (
    httpx2.TimeoutException,
    httpx2.NetworkError,
    httpx2.RemoteProtocolError,
    httpx2.ProxyError,
)


class RequestRefusedError(Exception):
    """The server has answered, and will not answer otherwise."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.status = status
        self.code = code
        self.message = message


class ServerUnreachableError(Exception):
    """No answer, however often it was asked."""


class PipelineClient:
    """One server. `token` is asked for at each request: it may be renewed while the pipeline runs."""

    def __init__(
        self,
        endpoint: str,
        token: Callable[[], str | None] = lambda: None,
        *,
        give_up_s: float = REQUEST_GIVE_UP_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._token = token
        self._give_up_s = give_up_s
        self._sleep = sleep
        self._http = httpx2.Client(base_url=endpoint, timeout=TIMEOUT_S)

    def close(self) -> None:
        self._http.close()

    def plan(
        self, jobs: str, *, stream: str | None = None, after: str | None = None, wait: bool = False
    ) -> PlanAnswer:
        """What is to be done, at once or when something turns up, a few seconds later at most."""
        parameters = {"jobs": jobs}
        if stream is not None:
            parameters["stream"] = stream
        if after is not None:
            parameters["after"] = after
        if wait:
            parameters["live"] = "long-poll"
        return self._ask("GET", "/v1/pipeline/plan", PlanAnswer, parameters)

    def publish(self, publication: PublishRequest) -> str:
        """`published` or `already_published`."""
        return self._ask("POST", "/v1/pipeline/publish", _Published, {}, publication).result

    def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        return self._ask("POST", "/v1/pipeline/heartbeat", HeartbeatAnswer, {}, heartbeat)

    def backlog_segments(self) -> int:
        """How many segments wait to be built: a plan lists only those that come next."""
        return self._ask("GET", "/v1/server/_details", _Details, {}).runtime.pipeline.backlog.segments

    def _ask(
        self, method: str, path: str, shape: type[T], parameters: dict[str, str], body: object = None
    ) -> T:
        content = None if body is None else msgspec.json.encode(body)
        until = time.monotonic() + self._give_up_s
        pause_s = PAUSE_S_FIRST
        while True:
            failure = ""
            try:
                answer = self._http.request(
                    method, path, params=parameters, content=content, headers=self._headers(content)
                )
            except _NETWORK_ERRORS as error:
                failure = f"{type(error).__name__}: {error}"
                if pause_s == PAUSE_S_FIRST:
                    where = self._http.base_url
                    logger.warning("no server answers at %s (%s); trying again for a while", where, failure)
            else:
                if answer.status_code == 200:
                    return msgspec.json.decode(answer.content, type=shape)
                if answer.status_code not in _RETRY_STATUSES:
                    raise parse_refusal(answer.status_code, answer.content)
                failure = f"the server answers {answer.status_code}"
            if time.monotonic() + pause_s > until:
                raise ServerUnreachableError(failure)
            # Never all at once: several pipelines may be waiting for the same server.
            self._sleep(pause_s * (0.5 + random.random()))  # noqa: S311 - no secret
            pause_s = min(pause_s * 2, PAUSE_S_MAX)

    def _headers(self, content: bytes | None) -> dict[str, str]:
        headers = {} if content is None else {"Content-Type": "application/json"}
        token = self._token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return headers


class _Published(msgspec.Struct):
    result: str


class _Backlog(msgspec.Struct):
    segments: int


class _Pipeline(msgspec.Struct):
    backlog: _Backlog


class _Runtime(msgspec.Struct):
    pipeline: _Pipeline


class _Details(msgspec.Struct):
    runtime: _Runtime


class _Error(msgspec.Struct):
    code: str = "unknown"
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Error


def parse_refusal(status: int, content: bytes) -> RequestRefusedError:
    try:
        error = msgspec.json.decode(content, type=_ErrorBody).error
    except msgspec.MsgspecError:
        error = _Error(message=f"the server answers {status}")
    return RequestRefusedError(status, error.code, error.message)
