"""The pipeline's requests to the server: plan, publications, and heartbeats with its status.

All requests are idempotent. Network errors and temporary statuses are retried with exponential back-off;
other error responses are raised as RequestRefusedError.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, TypeVar

import httpx2
import msgspec

from tailrace.common.backoff import Backoff
from tailrace.common.logging_setup import log_fields
from tailrace.common.timestamps import format_rfc3339
from tailrace.spark.failpoints import hit_failpoint
from tailrace.spark.index.file_writer import WRITER
from tailrace.spark.index.segment_build import BUILT, FAILED, UNDECODABLE
from tailrace.spark.jobs.index_build import SegmentBuildResult
from tailrace.spark.jobs.messages import (
    Heartbeat,
    HeartbeatResponse,
    PipelineTotals,
    PlanResponse,
    RunningJob,
)
from tailrace.storage.segments.index_files import (
    PublishedObject,
    PublishInput,
    PublishRequest,
    UnbuildableInput,
)

logger = logging.getLogger("tailrace.pipeline")

T = TypeVar("T")

TIMEOUT_S: Final = 30.0
PAUSE_S_FIRST: Final = 0.3
PAUSE_S_MAX: Final = 7.5
PAUSE_JITTER: Final = 2 / 3  # several pipelines may be retrying against the same server
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
    """An error response of the server that a retry would not change."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.status = status
        self.code = code
        self.message = message


class ServerUnreachableError(Exception):
    """No response within the time limit for retries."""


class PipelineClient:
    """The pipeline routes of one server. `token` is called for each request: tokens are renewed."""

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
    ) -> PlanResponse:
        """The work to do. With `wait`, a long-poll: an empty plan returns after a few seconds."""
        parameters = {"jobs": jobs}
        if stream is not None:
            parameters["stream"] = stream
        if after is not None:
            parameters["after"] = after
        if wait:
            parameters["live"] = "long-poll"
        return self._request("GET", "/v1/pipeline/plan", PlanResponse, parameters)

    def publish(self, publication: PublishRequest) -> str:
        """`published` or `already_published`."""
        return self._request("POST", "/v1/pipeline/publish", _Published, {}, publication).result

    def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatResponse:
        return self._request("POST", "/v1/pipeline/heartbeat", HeartbeatResponse, {}, heartbeat)

    def backlog_segments(self) -> int:
        """The number of segments without index files; a plan has only the next ones."""
        return self._request("GET", "/v1/server/_details", _Details, {}).runtime.pipeline.backlog.segments

    def _request(
        self, method: str, path: str, shape: type[T], parameters: dict[str, str], body: object = None
    ) -> T:
        content = None if body is None else msgspec.json.encode(body)
        until = time.monotonic() + self._give_up_s
        backoff = Backoff(PAUSE_S_FIRST, PAUSE_S_MAX, jitter=PAUSE_JITTER)
        while True:
            failure = ""
            try:
                response = self._http.request(
                    method, path, params=parameters, content=content, headers=self._headers(content)
                )
            except _NETWORK_ERRORS as error:
                failure = f"{type(error).__name__}: {error}"
                if not backoff.failures:
                    logger.warning(
                        "server unreachable, retrying",
                        extra=log_fields(url=str(self._http.base_url), error=failure),
                    )
            else:
                if response.status_code == 200:
                    return msgspec.json.decode(response.content, type=shape)
                if response.status_code not in _RETRY_STATUSES:
                    raise parse_refusal(response.status_code, response.content)
                failure = f"server responded with status {response.status_code}"
            pause_s = backoff.next_s()
            if time.monotonic() + pause_s > until:
                raise ServerUnreachableError(failure)
            self._sleep(pause_s)

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
        error = _Error(message=f"server responded with status {status}")
    return RequestRefusedError(status, error.code, error.message)


HEARTBEAT_INTERVAL_S: Final = 10.0
HEARTBEAT_GIVE_UP_S: Final = 5.0
BUILD_SECONDS_MAX: Final = 1000

PipelinePhase = Literal["starting", "running", "idle", "stopping"]


def utc_timestamp() -> str:
    return format_rfc3339(time.time_ns())


class PipelineStatus:
    """State and totals of the pipeline: written by the working thread, read by the heartbeat thread."""

    def __init__(self, master: str, mode: str = "local") -> None:
        self._lock = threading.Lock()
        self._master = master
        self._mode = mode
        self._started_at = utc_timestamp()
        self._state: PipelinePhase = "starting"
        self._running: list[RunningJob] = []
        self._last_error: str | None = None
        self._last_publish_at: str | None = None
        self._seconds: dict[str, list[float]] = {}
        self.totals = PipelineTotals()
        self.spark_version = ""
        self.on_change: Callable[[], None] = lambda: None

    def set_phase(self, state: PipelinePhase, running: list[RunningJob] | None = None) -> None:
        with self._lock:
            changed = state != self._state
            self._state = state
            self._running = running or []
        if changed:
            self.on_change()

    def record_result(self, outcome: SegmentBuildResult) -> None:
        """A segment was published or quarantined."""
        with self._lock:
            self.totals.segments += 1
            self.totals.rows += outcome.work.segment.rows
            self.totals.bytes_in += outcome.work.segment.raw_bytes
            self.totals.bytes_out += sum(file.bytes for file in outcome.files)
            if outcome.status != BUILT:
                self.totals.quarantined += 1
                self._last_error = f"{outcome.status}: {outcome.error}"
            for file in outcome.files:
                seconds = self._seconds.setdefault(file.family, [])
                if len(seconds) < BUILD_SECONDS_MAX:
                    seconds.append(file.seconds)

    def published(self, job: str, result: str) -> None:
        logger.info("publication accepted", extra=log_fields(job=job, result=result))
        with self._lock:
            self.totals.published += 1
            self._last_publish_at = utc_timestamp()

    def dropped(self, job: str, code: str) -> None:
        self.failed(f"{job}: {code}")

    def failed(self, message: str) -> None:
        with self._lock:
            self._last_error = message

    def heartbeat(self) -> Heartbeat:
        with self._lock:
            seconds, self._seconds = self._seconds, {}
            totals = msgspec.structs.asdict(self.totals)
            return Heartbeat(
                mode=self._mode,
                state=self._state,
                master=self._master,
                spark_version=self.spark_version,
                pid=os.getpid(),
                started_at=self._started_at,
                last_error=self._last_error,
                running=list(self._running),
                totals={
                    name: str(value) if name in ("rows", "bytes_in", "bytes_out") else value
                    for name, value in totals.items()
                },
                seconds=seconds,
                rss_bytes=str(process_tree_rss_bytes()),
                last_publish_at=self._last_publish_at,
            )


class HeartbeatThread:
    """Sends heartbeats on its own thread; the response may request the pipeline to drain."""

    def __init__(self, client: PipelineClient, status: PipelineStatus, on_drain: Callable[[], None]) -> None:
        self._client = client
        self._status = status
        self._on_drain = on_drain
        self._wake = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        status.on_change = self._wake.set

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Send a last heartbeat and stop."""
        self._ending = True
        self._wake.set()
        self._thread.join(HEARTBEAT_GIVE_UP_S * 2)

    def _run(self) -> None:
        while True:
            ending = self._ending
            try:
                response = self._client.heartbeat(self._status.heartbeat())
            except (RequestRefusedError, ServerUnreachableError) as error:
                logger.debug("heartbeat failed", extra=log_fields(error=str(error)))
            else:
                if response.drain:
                    self._on_drain()
            if ending:
                return
            self._wake.wait(HEARTBEAT_INTERVAL_S)
            self._wake.clear()


def process_tree_rss_bytes() -> int:
    """Resident memory of this process, its JVM and its workers; 0 without /proc."""
    try:
        children = _child_pids()
    except OSError:
        return 0
    waiting, seen = [os.getpid()], 0
    while waiting:
        pid = waiting.pop()
        seen += _process_rss_bytes(pid)
        waiting += children.get(pid, [])
    return seen


def _child_pids() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # the process has exited
            found.setdefault(parent, []).append(int(entry.name))
    return found


def _process_rss_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


# The plan, the inputs or the stream have changed since the work was started.
OUTDATED_CODES: Final = frozenset(
    {"plan_superseded", "inputs_changed", "range_conflict", "object_missing", "not_found", "stream_gone"}
)
_QUARANTINE_STATUSES: Final = frozenset({UNDECODABLE, FAILED})
_GroupKey = tuple[str, str, tuple[str, ...]]  # stream, plan, and replaced objects


class IndexPublisher:
    """Publishes results in groups of one stream. All families of a segment are in one request."""

    def __init__(self, client: PipelineClient, status: PipelineStatus, group_segments: int) -> None:
        self._client = client
        self._status = status
        self._group_segments = group_segments
        self._waiting: dict[_GroupKey, list[SegmentBuildResult]] = {}
        self.deferred: list[SegmentBuildResult] = []  # segments that could not be read or built this time

    def add(self, outcome: SegmentBuildResult) -> None:
        work = outcome.work
        # If one segment of a publish group fails, the group is not published.
        quarantine = outcome.status in _QUARANTINE_STATUSES and not work.publish_group_size
        if outcome.status != BUILT and not quarantine:
            self.deferred.append(outcome)
            self._status.failed(f"{outcome.status}: {outcome.error}")
            return
        key = (work.stream_id, work.plan.hash, work.replace)
        waiting = self._waiting.setdefault(key, [])
        waiting.append(outcome)
        if len(waiting) >= (work.publish_group_size or self._group_segments):
            self._publish(self._waiting.pop(key))

    def flush(self) -> None:
        while self._waiting:
            key, outcomes = self._waiting.popitem()
            if not key[2]:
                self._publish(outcomes)

    def _publish(self, outcomes: Sequence[SegmentBuildResult]) -> None:
        send_publish_request(self._client, self._status, index_publish_request(outcomes))
        for outcome in outcomes:
            self._status.record_result(outcome)


def send_publish_request(
    client: PipelineClient, status: PipelineStatus, publication: PublishRequest
) -> str | None:
    """The result; None if the server rejected the publication as outdated."""
    hit_failpoint("before_publish", "driver")
    try:
        result = client.publish(publication)
    except RequestRefusedError as refusal:
        if refusal.code not in OUTDATED_CODES:
            raise
        logger.info(
            "publication rejected as outdated", extra=log_fields(job=publication.job, code=refusal.code)
        )
        status.dropped(publication.job, refusal.code)
        return None
    hit_failpoint("after_publish", "driver")
    status.published(publication.job, result)
    return result


def index_publish_request(outcomes: Sequence[SegmentBuildResult]) -> PublishRequest:
    """The request for segments of one stream and plan. The same results give the same bytes."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.work.segment.first)
    work = ordered[0].work
    return PublishRequest(
        stream_id=work.stream_id,
        job="companions",
        plan_hash=work.plan.hash,
        writer=WRITER,
        inputs=[PublishInput(one.work.segment.object, one.work.segment.sha256) for one in ordered],
        add=[added for outcome in ordered for added in _added_objects(outcome)],
        replace=list(work.replace),
        quarantine=[
            UnbuildableInput(one.work.segment.object, one.status, one.error)
            for one in ordered
            if one.status != BUILT
        ],
    )


def _added_objects(outcome: SegmentBuildResult) -> list[PublishedObject]:
    segment = outcome.work.segment
    return [
        PublishedObject(
            file.family,
            segment.first,
            segment.last,
            file.rows,
            file.object,
            file.bytes,
            file.sha256,
            file.stats,
        )
        for file in outcome.files
    ]
