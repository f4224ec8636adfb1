"""``tailrace pipeline match``, ``rescan``, ``stats``, ``capture`` and ``shadow``: watch on Spark."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import App, Group, Parameter

from tailrace.cli.errors import RefusedError, UnreachableError, UsageError
from tailrace.cli.session import (
    DEFAULT_SESSION,
    Session,
    flush_output,
    print_json,
    require_server,
    write_output,
)

if TYPE_CHECKING:
    from tailrace.spark.live_queries.watch_client import RangeBound, WatchClient

_GROUP: Final = Group("Spark", sort_key=8)
FAILED: Final = 3
ERROR: Final = 2


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SparkOptions:
    """Flags of all commands that run a job."""

    master: Annotated[
        str, Parameter(env_var="TAILRACE_PIPELINE_MASTER", group=_GROUP, help="Where Spark runs.")
    ] = "local[*]"
    store: Annotated[
        str | None,
        Parameter(group=_GROUP, help="Object store URL for executors; by default that of the server."),
    ] = None


DEFAULT_SPARK: Final = SparkOptions()
Database = Annotated[str, Parameter(help="The database.")]
From = Annotated[
    str,
    Parameter(
        name="--from", help="Start of the changes: earliest, a timestamp, or positions as in [118,0,97]."
    ),
]
To = Annotated[str, Parameter(name="--to", help="End of the changes: latest, a timestamp, or positions.")]

match_command = App(
    name="match",
    help_format="markdown",
    help="""Match a range of changes with the current subscriptions, and write deliveries.

    tailrace pipeline match --database default --from 2026-01-01T00:00:00Z --checkpoint /var/lib/match-1

With a checkpoint a killed run is repeated exactly: nothing is delivered twice.
""",
)
rescan_command = App(
    name="rescan",
    help_format="markdown",
    help="""Rebuild the view of a collection from its log, and compare it with that of the server.

    tailrace pipeline rescan --database default --collection orders

    tailrace pipeline rescan --database default --collection orders --apply

Exit code 3 if there are differences that were not corrected.
""",
)
stats_command = App(
    name="stats",
    help_format="markdown",
    help="""Fields, selectivity, Bloom filters and skew of collections; published in the object store.

    tailrace pipeline stats --database default --collection orders
""",
)
capture_command = App(
    name="capture",
    help_format="markdown",
    help="""Store a range of changes and the current subscriptions, with some values masked.

    tailrace pipeline capture --changes default/orders --mask email,card.number --sample 0.01 --out ./orders-1
""",
)
shadow_command = App(
    name="shadow",
    help_format="markdown",
    help="""Compare two versions of the matcher on the same changes and subscriptions.

    tailrace pipeline shadow --capture ./orders-1 --baseline installed --candidate tailrace-1.1.whl

A version is a wheel, a directory that holds the package, a version number, or `installed`. The exit code is 0
if both give the same result and the candidate is not too slow, 3 if not, 2 if the comparison failed.
""",
)


@match_command.default
def match(
    *,
    database: Database = "default",
    collections: Annotated[
        str, Parameter(help="A glob: * matches one segment of a name, ** any number.")
    ] = "**",
    start: From = "earliest",
    end: To = "latest",
    checkpoint: Annotated[
        str | None, Parameter(help="Where the range and subscriptions of the run are stored.")
    ] = None,
    engine: SparkOptions = DEFAULT_SPARK,
    session: Session = DEFAULT_SESSION,
) -> None:
    with _running(session, engine) as (spark, place):
        from tailrace.spark.live_queries.match_job import MatchOptions, run_match

        options = MatchOptions(database, collections, _bound(start), _bound(end), engine.store, checkpoint)
        _show(run_match(spark, place, options), session)


@rescan_command.default
def rescan(
    *,
    collection: Annotated[str, Parameter(help="The collection.")],
    database: Database = "default",
    source: Annotated[
        Literal["log", "source"],
        Parameter(name="--from", help="The reference: log. The source of native collections is the log."),
    ] = "log",
    publish_view: Annotated[
        bool, Parameter(negative="", help="Write the rebuilt view to the object store.")
    ] = False,
    apply: Annotated[bool, Parameter(negative="", help="Let the server correct the differences.")] = False,
    engine: SparkOptions = DEFAULT_SPARK,
    session: Session = DEFAULT_SESSION,
) -> int:
    with _running(session, engine) as (spark, place):
        from tailrace.spark.live_queries.rescan_job import RescanOptions, run_rescan

        options = RescanOptions(database, collection, source == "source", publish_view, apply, engine.store)
        report = run_rescan(spark, place, options)
        _show(report, session)
    left = report.missing + report.extra + report.differs - report.applied
    return FAILED if left or report.broken else 0


@stats_command.default
def stats(
    *,
    database: Database = "default",
    collection: Annotated[str | None, Parameter(help="Only this collection.")] = None,
    start: From = "earliest",
    end: To = "latest",
    engine: SparkOptions = DEFAULT_SPARK,
    session: Session = DEFAULT_SESSION,
) -> None:
    with _running(session, engine) as (spark, place):
        from tailrace.spark.live_queries.stats_job import StatsOptions, run_stats

        options = StatsOptions(database, collection, _bound(start), _bound(end), engine.store)
        for one in run_stats(spark, place, options):
            _show(one, session)


@capture_command.default
def capture(
    *,
    changes: Annotated[str, Parameter(help="Database and collection, as in default/orders.")],
    out: Annotated[str, Parameter(help="A new directory, or a URL in a bucket.")],
    start: From = "earliest",
    end: To = "latest",
    sample: Annotated[float, Parameter(help="The share of documents whose changes are stored.")] = 1.0,
    mask: Annotated[str, Parameter(help="Fields whose values are masked, separated by commas.")] = "",
    engine: SparkOptions = DEFAULT_SPARK,
    session: Session = DEFAULT_SESSION,
) -> None:
    if not 0 < sample <= 1:
        raise UsageError("--sample must be more than 0 and at most 1")
    database, collection = _split(changes)
    fields = tuple(field.strip() for field in mask.split(",") if field.strip())
    with _running(session, engine) as (spark, place):
        from tailrace.spark.live_queries.capture_job import CaptureOptions, run_capture

        options = CaptureOptions(database, collection, out, _bound(start), _bound(end), sample, fields)
        _show(run_capture(spark, place, options), session)


@shadow_command.default
def shadow(
    *,
    baseline: Annotated[str, Parameter(help="The reference version.")] = "installed",
    candidate: Annotated[str, Parameter(help="The version to test.")],
    capture: Annotated[str | None, Parameter(help="A capture; alternatively --changes.")] = None,
    changes: Annotated[str | None, Parameter(help="Database and collection, as in default/orders.")] = None,
    start: From = "earliest",
    end: To = "latest",
    max_divergence: Annotated[float, Parameter(help="Share of matches that may differ.")] = 0.0,
    max_latency_ratio: Annotated[float, Parameter(help="How much slower the p99 may be.")] = 1.2,
    report: Annotated[Path, Parameter(help="A directory for the report.")] = Path("shadow-report"),
    engine: SparkOptions = DEFAULT_SPARK,
    session: Session = DEFAULT_SESSION,
) -> int:
    try:
        if (capture is None) == (changes is None):
            raise UsageError("use either --capture or --changes")
        database, collection = ("", "") if changes is None else _split(changes)
        with _running(session, engine, asks_server=capture is None) as (spark, place):
            from tailrace.spark.live_queries.shadow_job import ShadowOptions, run_shadow, write_report

            options = ShadowOptions(
                baseline,
                candidate,
                capture,
                database,
                collection,
                _bound(start),
                _bound(end),
                engine.store,
                max_divergence,
                max_latency_ratio,
            )
            verdict = run_shadow(spark, place if capture is None else None, options)
            write_report(verdict, report)
            _show(verdict.report(), session)
            print(f"the report is in {report}", file=sys.stderr)
    except (RefusedError, UnreachableError, UsageError) as error:
        # 3 would mean that the two differ.
        print(f"tailrace: {error}", file=sys.stderr)
        return ERROR
    return 0 if verdict.verdict == "pass" else FAILED


@contextmanager
def _running(
    session: Session, engine: SparkOptions, *, asks_server: bool = True
) -> Generator[tuple[Any, WatchClient]]:
    """A Spark session and a server client; errors are mapped to those of the command line."""
    from tailrace.cli.spark_requirements import require_spark

    require_spark(engine.master)
    if asks_server:
        require_server(session)
    from pyspark.errors import PySparkException

    from tailrace.client.errors import ClientError
    from tailrace.spark.live_queries.capture_job import CaptureExistsError
    from tailrace.spark.live_queries.rescan_job import (
        ExternalSourceError,
        MissingBaseViewError,
        ViewPublicationError,
    )
    from tailrace.spark.live_queries.shadow_job import PackageVersionError
    from tailrace.spark.live_queries.subscription_matcher import MatcherMismatchError
    from tailrace.spark.live_queries.watch_client import (
        MissingBeforeImageError,
        RangeBoundError,
        WatchClient,
    )
    from tailrace.spark.options import OptionError
    from tailrace.spark.session import normalize_master, open_session
    from tailrace.storage.object_store.interface import ObjectStoreError

    given = {"endpoint": session.url} | ({"token": session.token} if session.token else {})
    print("starting Spark, a few seconds ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="tailrace-watch-") as directory:
        spark = open_session(normalize_master(engine.master), Path(directory))
        try:
            yield spark, WatchClient(given)
        except PySparkException as error:
            raise RefusedError(first_line(error)) from None
        except ClientError as error:
            if error.code in ("connect_failed", "connection_lost"):
                raise UnreachableError(f"no server responds at {session.url}") from None
            raise RefusedError(error.message) from None
        except (
            RangeBoundError,
            MissingBeforeImageError,
            OptionError,
            PackageVersionError,
            CaptureExistsError,
            ExternalSourceError,
        ) as error:
            raise UsageError(str(error)) from None
        except (ObjectStoreError, MatcherMismatchError, MissingBaseViewError, ViewPublicationError) as error:
            raise RefusedError(str(error)) from None
        finally:
            spark.stop()


def first_line(error: Exception) -> str:
    """The message without the Java stack trace."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _bound(text: str) -> RangeBound:
    from tailrace.spark.live_queries.watch_client import RangeBound

    return RangeBound.parse(text)


def _split(text: str) -> tuple[str, str]:
    database, slash, collection = text.partition("/")
    if not slash or not database or not collection:
        raise UsageError("a collection must be given as database/collection")
    return database, collection


def _show(found: Any, session: Session) -> None:
    import msgspec

    plain = msgspec.to_builtins(found)
    if session.json:
        print_json(plain)
    else:
        write_output(msgspec.json.format(msgspec.json.encode(plain), indent=2) + b"\n")
    flush_output()
