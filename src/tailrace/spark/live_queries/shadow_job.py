"""`tailrace pipeline shadow`: two versions of the matcher run on the same changes and compared.

Each version of the package is an archive in the object store. A task unpacks both, runs the matcher of each
in a Python process (see `subscription_matcher`), and compares their matches and times. The verdict is written
as JSON and as a Markdown page with a histogram. Nothing is written to delivery streams.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NamedTuple, cast

import msgspec

import tailrace
from tailrace.spark.live_queries.capture_job import captured_frame, load_capture
from tailrace.spark.live_queries.subscription_matcher import read_frame, write_frame
from tailrace.spark.live_queries.subscription_sets import read_subscription_set
from tailrace.spark.live_queries.watch_client import ChangeRange, RangeBound, WatchClient
from tailrace.spark.object_stores import shared_object_store
from tailrace.spark.options import store_url
from tailrace.storage.segments.parquet import INT32, INT64, STRING, pa

ARCHIVES_FOLDER: Final = "watch/matchers/"
PACKAGE: Final = "tailrace"
ARCHIVE_BYTES_MAX: Final = 64 << 20
DOWNLOAD_S_MAX: Final = 300
_ZIP_DATE: Final = (1980, 1, 1, 0, 0, 0)  # constant, so that archives are deterministic


class PackageVersionError(ValueError):
    """A version of the package cannot be loaded."""


def load_archive(version: str) -> bytes:
    """The archive of a version: a wheel, a directory with the package, `installed`, or a version number."""
    path = Path(version)
    if path.suffix in (".whl", ".zip"):
        if not path.is_file():
            raise PackageVersionError(f"file not found: {version}")
        return _verify_archive(path.read_bytes(), version)
    if (path / PACKAGE / "__init__.py").is_file():
        return _zip_package(path / PACKAGE)
    if version in ("installed", tailrace.__version__):
        return _zip_package(Path(tailrace.__file__).parent)
    if "/" in version or path.exists():
        raise PackageVersionError(f"{version} is neither a wheel nor a directory with the package {PACKAGE}")
    return _download_wheel(version)


def put_archive(store: str, data: bytes) -> str:
    name = hashlib.sha256(data).hexdigest()
    shared_object_store(store).create(f"{ARCHIVES_FOLDER}{name}.zip", data)
    return name


def unpack_archive(store: str, name: str, directory: Path) -> None:
    """Extract the package of a stored archive into a directory, which is used as PYTHONPATH."""
    data = shared_object_store(store).get(f"{ARCHIVES_FOLDER}{name}.zip")
    if hashlib.sha256(data).hexdigest() != name:
        raise PackageVersionError(f"archive {name} has the wrong SHA-256")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        archive.extractall(directory, [one for one in archive.namelist() if one.startswith(f"{PACKAGE}/")])


def _verify_archive(data: bytes, version: str) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if f"{PACKAGE}/__init__.py" not in archive.namelist():
                raise PackageVersionError(f"{version} does not contain the package {PACKAGE}")
            if sum(one.file_size for one in archive.infolist()) > ARCHIVE_BYTES_MAX:
                raise PackageVersionError(f"{version} is larger than {ARCHIVE_BYTES_MAX} bytes")
    except zipfile.BadZipFile:
        raise PackageVersionError(f"{version} is not a wheel") from None
    return data


def _zip_package(package: Path) -> bytes:
    """A deterministic archive of the files."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in sorted(package.rglob("*")):
            name = path.relative_to(package)
            if path.is_file() and "__pycache__" not in name.parts:
                archive.writestr(
                    zipfile.ZipInfo(f"{PACKAGE}/{name.as_posix()}", _ZIP_DATE), path.read_bytes()
                )
    return sink.getvalue()


def _download_wheel(version: str) -> bytes:
    """Download with pip, from the index that is configured on this machine."""
    with tempfile.TemporaryDirectory(prefix="tailrace-version-") as directory:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q"]
        try:
            subprocess.run(  # noqa: S603 - no shell, and the version is one argument
                [*command, "-d", directory, f"{PACKAGE}=={version}"],
                capture_output=True,
                timeout=DOWNLOAD_S_MAX,
                check=True,
            )
        except subprocess.SubprocessError:
            raise PackageVersionError(
                f"version {version} cannot be downloaded; pass a wheel instead"
            ) from None
        wheels = list(Path(directory).glob("*.whl"))
        if not wheels:
            raise PackageVersionError(f"version {version} is not available as a wheel")
        return _verify_archive(wheels[0].read_bytes(), version)


MATCH_ROWS_MAX: Final = 200  # per frame, so that neither side blocks on a full pipe
BUCKET_GROWTH: Final = 1.05  # ratio of adjacent latency buckets
SIDES: Final = ("baseline", "candidate")
# The first module that a version has is run; the second one is that of older versions.
MATCHER_MODULES: Final = (
    "tailrace.spark.live_queries.subscription_matcher",
    "tailrace.pipeline.watch.matcher_process",
)
EXIT_S_MAX: Final = 10

COMPARISON_SCHEMA: Final = pa.schema(
    [
        ("kind", STRING),  # changes, matches, latency, differs
        ("side", STRING),
        ("bucket", INT32),
        ("count", INT64),
        ("partition", INT32),
        ("seq", INT64),
        ("subscription", STRING),
        ("baseline", STRING),
        ("candidate", STRING),
    ]
)
COMPARISON_DDL: Final = (
    "kind string, side string, bucket int, count bigint, partition int, seq bigint, subscription string, "
    "baseline string, candidate string"
)

ComparisonRow = dict[str, Any]
MatchesByKey = dict[str, str]  # by subscription: operation and reason


class MatcherProcessError(RuntimeError):
    """A matcher process cannot be started, or has exited."""


class ShadowTask(msgspec.Struct, frozen=True):
    store: str
    archives: tuple[str, str]
    subscriptions: bytes


class MatcherProcess:
    """The matcher process of one version."""

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self._process = process
        self._name = name
        self._requests = cast("BinaryIO", process.stdin)
        self._responses = cast("BinaryIO", process.stdout)

    def start(self, subscriptions: bytes, directory: Path) -> None:
        about = msgspec.json.decode(self._request(subscriptions))
        if not Path(about["path"]).is_relative_to(directory):
            raise MatcherProcessError(
                f"matcher of the {self._name} runs the package at {about['path']}, expected it in {directory}"
            )

    def match(self, rows: list[tuple[int, int, int, bytes]]) -> list[tuple[int, MatchesByKey]]:
        response: list[Any] = msgspec.msgpack.decode(self._request(msgspec.msgpack.encode(rows)))
        return [(ns, {key: f"{op} {reason}" for key, op, reason in matches}) for ns, matches in response]

    def _request(self, frame: bytes) -> bytes:
        try:
            write_frame(self._requests, frame)
            response = read_frame(self._responses)
        except BrokenPipeError:
            response = None
        if response is None:
            code = self._process.wait(EXIT_S_MAX)
            raise MatcherProcessError(f"matcher of the {self._name} exited with code {code}")
        return response


def matcher_module(directory: Path) -> str:
    """The matcher module of an unpacked version."""
    for module in MATCHER_MODULES:
        if (directory / module.replace(".", "/")).with_suffix(".py").is_file():
            return module
    raise MatcherProcessError(f"version has no matcher: expected one of {', '.join(MATCHER_MODULES)}")


@contextmanager
def run_matchers(task: ShadowTask) -> Generator[list[MatcherProcess]]:
    """Run the matchers of both versions. They are killed at the end."""
    with ExitStack() as stack:
        sides: list[MatcherProcess] = []
        for name, archive in zip(SIDES, task.archives, strict=True):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailrace-shadow-")))
            unpack_archive(task.store, archive, directory)
            environment = {**os.environ, "PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
            process = stack.enter_context(
                subprocess.Popen(  # noqa: S603 - our own command
                    [sys.executable, "-P", "-m", matcher_module(directory)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=environment,
                    cwd=directory,
                )
            )
            stack.callback(process.kill)
            side = MatcherProcess(process, name)
            side.start(task.subscriptions, directory)
            sides.append(side)
        yield sides


def compare_changes(task: ShadowTask, batches: Iterator[Any]) -> Iterator[Any]:
    """For `mapInArrow`: counts, times and differences of the two matchers over the changes."""
    tally = _ComparisonTally()
    with run_matchers(task) as sides:
        for batch in batches:
            names = ("stream", "entry", "timestamp_ns", "value")
            columns: list[list[Any]] = [batch.column(name).to_pylist() for name in names]
            rows = [
                (int(stream.rpartition("/")[2]), entry, time_ns, value)
                for stream, entry, time_ns, value in zip(*columns, strict=True)
            ]
            differing: list[ComparisonRow] = []
            for start in range(0, len(rows), MATCH_ROWS_MAX):
                differing += _compare_batch(sides, rows[start : start + MATCH_ROWS_MAX], tally)
            if differing:
                yield pa.RecordBatch.from_pylist(differing, schema=COMPARISON_SCHEMA)
    yield pa.RecordBatch.from_pylist(tally.rows(), schema=COMPARISON_SCHEMA)


def _compare_batch(
    sides: list[MatcherProcess], rows: list[tuple[int, int, int, bytes]], tally: _ComparisonTally
) -> list[ComparisonRow]:
    # The second side profits from warm CPU caches, so they alternate.
    first_side = tally.changes // MATCH_ROWS_MAX % 2
    first_found = sides[first_side].match(rows)
    second_found = sides[1 - first_side].match(rows)
    baseline, candidate = (first_found, second_found) if first_side == 0 else (second_found, first_found)
    differing: list[ComparisonRow] = []
    for row, (one_ns, one), (other_ns, other) in zip(rows, baseline, candidate, strict=True):
        tally.add(0, one_ns, len(one))
        tally.add(1, other_ns, len(other))
        if one != other:
            differing += [
                {
                    "kind": "differs",
                    "count": 1,
                    "partition": row[0],
                    "seq": row[1],
                    "subscription": key,
                    "baseline": one.get(key),
                    "candidate": other.get(key),
                }
                for key in sorted(one.keys() | other.keys())
                if one.get(key) != other.get(key)
            ]
    tally.changes += len(rows)
    return differing


class _ComparisonTally:
    """The counts and latency histograms of a task."""

    def __init__(self) -> None:
        self.changes = 0
        self._matches = [0, 0]
        self._times: tuple[dict[int, int], dict[int, int]] = ({}, {})

    def add(self, side: int, ns: int, matches: int) -> None:
        self._matches[side] += matches
        bucket = latency_bucket(ns)
        self._times[side][bucket] = self._times[side].get(bucket, 0) + 1

    def rows(self) -> list[ComparisonRow]:
        found: list[ComparisonRow] = [{"kind": "changes", "count": self.changes}]
        for index, side in enumerate(SIDES):
            found.append({"kind": "matches", "side": side, "count": self._matches[index]})
            found += [
                {"kind": "latency", "side": side, "bucket": bucket, "count": count}
                for bucket, count in sorted(self._times[index].items())
            ]
        return found


def latency_bucket(ns: int) -> int:
    return int(math.log(max(ns, 1)) / math.log(BUCKET_GROWTH))


def bucket_midpoint_us(bucket: int) -> float:
    """The geometric middle of a bucket, in microseconds."""
    return BUCKET_GROWTH ** (bucket + 0.5) / 1000


REPORT_FILE, PAGE_FILE, PICTURE_FILE = "report.json", "report.md", "latency.svg"
EXAMPLES_SHOWN: Final = 20
_WIDTH, _HEIGHT, _MARGIN = 640, 260, 40
_COLOURS: Final = {"baseline": "#8a8f98", "candidate": "#2f6feb"}

LatencyHistogram = dict[int, int]  # number of changes by latency bucket


class SidePair(msgspec.Struct, frozen=True):
    baseline: float = 0
    candidate: float = 0


class ShadowVerdict(msgspec.Struct, frozen=True):
    """The result. `p50` and `p99` are microseconds per change; `times` is for the histogram only."""

    baseline: str
    candidate: str
    changes: int = 0
    subscriptions: int = 0
    matches: SidePair = SidePair()
    missing: int = 0
    extra: int = 0
    opDiffers: int = 0  # noqa: N815 - the name on the wire
    p50: SidePair = SidePair()
    p99: SidePair = SidePair()
    examples: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])
    verdict: Literal["pass", "fail"] = "pass"
    times: dict[str, LatencyHistogram] = msgspec.field(default_factory=dict[str, LatencyHistogram])

    @property
    def divergence(self) -> float:
        """The share of matches that only one side has."""
        differing = self.missing + self.extra + 2 * self.opDiffers
        union = (self.matches.baseline + self.matches.candidate + differing) / 2
        return differing / union if union else 0.0

    @property
    def latencyRatio(self) -> float:  # noqa: N802 - as above
        return self.p99.candidate / self.p99.baseline if self.p99.baseline else 1.0

    def report(self) -> dict[str, Any]:
        found = msgspec.to_builtins(self)
        del found["times"]
        found["matches"] = {side: int(count) for side, count in found["matches"].items()}
        return found | {"divergence": self.divergence, "latencyRatio": round(self.latencyRatio, 3)}


def write_report(verdict: ShadowVerdict, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / REPORT_FILE).write_bytes(
        msgspec.json.format(msgspec.json.encode(verdict.report()), indent=2) + b"\n"
    )
    (directory / PAGE_FILE).write_text(render_page(verdict), encoding="utf-8")
    (directory / PICTURE_FILE).write_text(render_histogram(verdict.times), encoding="utf-8")


def render_page(verdict: ShadowVerdict) -> str:
    matches, p50, p99 = verdict.matches, verdict.p50, verdict.p99
    counted = f"{verdict.changes} changes, {verdict.subscriptions} subscriptions"
    lines = [
        f"# Shadow validation: {verdict.verdict}",
        "",
        f"{counted}, divergence {verdict.divergence:.6f}.",
        "",
        f"| | baseline ({verdict.baseline}) | candidate ({verdict.candidate}) |",
        "|---|---|---|",
        f"| matches | {matches.baseline:.0f} | {matches.candidate:.0f} |",
        f"| found by this side only | {verdict.missing} | {verdict.extra} |",
        f"| found by both with another operation | {verdict.opDiffers} | {verdict.opDiffers} |",
        f"| p50 per change | {p50.baseline} µs | {p50.candidate} µs |",
        f"| p99 per change | {p99.baseline} µs | {p99.candidate} µs |",
        "",
        f"![Latency histogram]({PICTURE_FILE})",
    ]
    if verdict.examples:
        shown = verdict.examples[:EXAMPLES_SHOWN]
        lines += [
            "",
            f"The first {len(shown)} differences; up to 100 are in `{REPORT_FILE}`:",
            "",
            "| partition | seq | subscription | baseline | candidate |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {one['partition']} | {one['seq']} | {one['subscription']} | {one['baseline'] or '–'} "
            f"| {one['candidate'] or '–'} |"
            for one in shown
        ]
    return "\n".join(lines) + "\n"


def render_histogram(times: dict[str, LatencyHistogram]) -> str:
    """An SVG histogram of both sides, with a logarithmic time axis."""
    buckets = [bucket for found in times.values() for bucket in found]
    low, high = (min(buckets), max(buckets)) if buckets else (0, 1)
    most = max((count for found in times.values() for count in found.values()), default=1)
    inner_width, inner_height = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN
    step = inner_width / (high - low + 1)
    bottom = _HEIGHT - _MARGIN
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for index, (side, colour) in enumerate(_COLOURS.items()):
        for bucket, count in sorted(times.get(side, {}).items()):
            height = inner_height * count / most
            x = _MARGIN + (bucket - low) * step + index * step / 2
            parts.append(
                f'<rect x="{x:.1f}" y="{bottom - height:.1f}" width="{step / 2:.1f}" height="{height:.1f}" '
                f'fill="{colour}"/>'
            )
        parts.append(
            f'<text x="{_MARGIN + 110 * index}" y="{_MARGIN - 16}" fill="{colour}">{escape(side)}</text>'
        )
    parts.append(f'<path d="M{_MARGIN} {bottom}H{_WIDTH - _MARGIN}" stroke="#444"/>')
    for share in (0.0, 0.5, 1.0):
        bucket = low + round((high - low) * share)
        x = _MARGIN + inner_width * share
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">'
            f"{bucket_midpoint_us(bucket):.1f} µs</text>"
        )
    parts.append(f'<text x="{_MARGIN - 6}" y="{_MARGIN}" text-anchor="end">{most}</text>')
    return "\n".join([*parts, "</svg>", ""])


EXAMPLES_MAX: Final = 100


class ShadowOptions(NamedTuple):
    """Options of a comparison, over a capture or a range of a collection."""

    baseline: str
    candidate: str
    capture: str | None = None
    database: str = ""
    collection: str = ""
    start: RangeBound = RangeBound("earliest")
    end: RangeBound = RangeBound("latest")
    store: str | None = None
    max_divergence: float = 0.0
    max_latency_ratio: float = 1.2


def run_shadow(spark: Any, client: WatchClient | None, options: ShadowOptions) -> ShadowVerdict:
    archives = [load_archive(version) for version in (options.baseline, options.candidate)]
    if options.capture is not None:
        capture, subscriptions = load_capture(options.capture)
        store = options.store or store_url(options.capture)
        frame = captured_frame(spark, options.capture, capture) if capture.parts else None
    else:
        assert client is not None, "a range of changes is read from a server"
        store = options.store or client.store()
        client.check_matchable(options.database, options.collection)
        summaries = client.request_summaries(options.database)
        try:
            subscriptions = read_subscription_set(
                client.server, summaries.stream, summaries.offset, options.database, [options.collection]
            )
        finally:
            client.request_summaries(options.database, 0)
        ranges = client.ranges(options.database, options.collection, options.start, options.end)
        frame = _range_frame(spark, client, ranges)
    names = [put_archive(store, data) for data in archives]
    task = ShadowTask(store, (names[0], names[1]), subscriptions.encode())
    if frame is None:
        return ShadowVerdict(options.baseline, options.candidate, subscriptions=len(subscriptions.subs))
    compared = frame.mapInArrow(partial(compare_changes, task), COMPARISON_DDL)
    return _judge(compared, options, len(subscriptions.subs))


def _range_frame(spark: Any, client: WatchClient, ranges: list[ChangeRange]) -> Any:
    return client.frame(spark, ranges) if ranges else None


def _judge(compared: Any, options: ShadowOptions, subscriptions: int) -> ShadowVerdict:
    from pyspark.sql import functions as f

    # Evaluated twice, and matching is the expensive part.
    compared = compared.persist()
    try:
        missing = f.when(f.col("baseline").isNotNull() & f.col("candidate").isNull(), "missing")
        outcome = missing.when(f.col("baseline").isNull(), "extra").otherwise("opDiffers")
        kind = f.when(f.col("kind") == "differs", outcome).otherwise(f.col("kind"))
        totals = (
            compared.groupBy(kind.alias("what"), "side", "bucket")
            .agg(f.sum("count").alias("count"))
            .collect()
        )
        examples = (
            compared.where("kind = 'differs'")
            .select("partition", "seq", "subscription", "baseline", "candidate")
            .orderBy("partition", "seq", "subscription")
            .limit(EXAMPLES_MAX)
            .collect()
        )
    finally:
        compared.unpersist()
    counts: dict[str, int] = {}
    matches: dict[str, int] = dict.fromkeys(SIDES, 0)
    times: dict[str, LatencyHistogram] = {side: {} for side in SIDES}
    for row in totals:
        if row["what"] == "matches":
            matches[row["side"]] = row["count"]
        elif row["what"] == "latency":
            times[row["side"]][row["bucket"]] = row["count"]
        else:
            counts[row["what"]] = row["count"]
    verdict = ShadowVerdict(
        options.baseline,
        options.candidate,
        changes=counts.get("changes", 0),
        subscriptions=subscriptions,
        matches=SidePair(**matches),
        missing=counts.get("missing", 0),
        extra=counts.get("extra", 0),
        opDiffers=counts.get("opDiffers", 0),
        p50=SidePair(*(quantile(times[side], 0.50) for side in SIDES)),
        p99=SidePair(*(quantile(times[side], 0.99) for side in SIDES)),
        examples=[row.asDict() for row in examples],
        times=times,
    )
    passed = (
        verdict.divergence <= options.max_divergence and verdict.latencyRatio <= options.max_latency_ratio
    )
    return msgspec.structs.replace(verdict, verdict="pass" if passed else "fail")


def quantile(times: LatencyHistogram, share: float) -> float:
    """The quantile in microseconds, exact to about 5 %."""
    left = share * sum(times.values())
    for bucket, count in sorted(times.items()):
        left -= count
        if left <= 0:
            return round(bucket_midpoint_us(bucket), 2)
    return 0.0
