"""``tailrace pipeline run``: build index files, merge and compact with Spark, with a progress bar."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TextIO

from cyclopts import App, Group, Parameter

from tailrace.cli.errors import RefusedError, UnreachableError, UsageError
from tailrace.cli.options import parse_size_bytes
from tailrace.cli.session import URL_DEFAULT, URL_VARIABLES, Session, require_server, with_scheme
from tailrace.cli.spark_requirements import require_spark
from tailrace.common import private_files

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from tailrace.spark.jobs.pipeline import PipelineOptions, ProgressListener, SupervisorSettings
    from tailrace.spark.jobs.pipeline_client import PipelineClient, PipelineStatus


class ProgressBar:
    """One line for each kind of job. `backlog` returns the number of waiting segments."""

    def __init__(self, backlog: Callable[[], int], to: TextIO | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Drawn

        self._backlog = backlog
        console = Console(stderr=True) if to is None else Console(file=to, force_terminal=True, width=100)
        self._console: Console = console
        columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn())
        self._drawn = Drawn(
            *columns, TextColumn("{task.fields[words]}"), TimeElapsedColumn(), console=console
        )
        self._tasks: dict[str, TaskID] = {}
        self._done: dict[str, int] = {}

    def starting(self, master: str) -> None:
        self._console.print(f"starting Spark at {master}, which takes some seconds …", style="dim")

    def batch(self, job: str, count: int) -> None:
        waiting = max(count, self._backlog()) if job == "companions" else count
        total = self._done.setdefault(job, 0) + waiting
        if job in self._tasks:
            self._drawn.update(self._tasks[job], total=total)
        else:
            self._tasks[job] = self._drawn.add_task(job, total=total, words="")
        self._drawn.start()

    def advance(self, job: str, status: PipelineStatus) -> None:
        self._done[job] += 1
        words = _words(status) if job == "companions" else ""
        self._drawn.update(self._tasks[job], completed=self._done[job], words=words)

    def done(self, status: PipelineStatus) -> None:
        """Print a summary instead of the bar: the next batch may be hours away."""
        self._drawn.stop()
        totals = status.totals
        given_up = f", {totals.quarantined} segments given up" if totals.quarantined else ""
        self._console.print(f"{totals.segments} segments: {_words(status)}{given_up}")


def _words(status: PipelineStatus) -> str:
    totals = status.totals
    return (
        f"{totals.rows:,} entries, {totals.bytes_in >> 20:,} MiB read, {totals.bytes_out >> 20:,} MiB written"
    )


_HELP: Final = """Build index files, merge and compact with Spark, until Ctrl-C or, with `--once`, all done.

A server starts its own pipeline where Java 17 and the `spark` extra are installed. Run one yourself to use
another machine or a cluster (`TAILRACE_PIPELINE=external`), or from cron:

    tailrace pipeline run --once

    tailrace pipeline run --master 'local[4]'

    tailrace pipeline run --master spark://host:7077 --store s3://bucket/prefix

Two pipelines at once do duplicate work but no harm. `k8s://` and `yarn` are accepted, but not tested.
"""
_SPARK: Final = Group("Spark", sort_key=2)
_BATCH: Final = Group("Batches", sort_key=3)
JOBS: Final = ("companions", "merge", "compact")

Endpoint = Annotated[
    str,
    Parameter(name=("--endpoint", "--url"), env_var=URL_VARIABLES, help="The server; http:// is optional."),
]

command = App(name="run", help=_HELP, help_format="markdown")


@command.default
def run(
    *,
    endpoint: Endpoint = URL_DEFAULT,
    token_file: Annotated[
        Path | None, Parameter(help="File with an access token of scope manage; reloaded when it changes.")
    ] = None,
    token: Annotated[str | None, Parameter(env_var="TAILRACE_TOKEN", show=False)] = None,
    jobs: Annotated[str, Parameter(help="companions, merge, compact, or all.")] = ",".join(JOBS),
    once: Annotated[bool, Parameter(negative="", help="Do all waiting work, then exit.")] = False,
    master: Annotated[
        str,
        Parameter(
            env_var="TAILRACE_PIPELINE_MASTER", group=_SPARK, help="local[N], spark://, sc://, k8s://."
        ),
    ] = "local[*]",
    store: Annotated[
        str | None,
        Parameter(group=_SPARK, help="Object store URL for executors; by default that of the server."),
    ] = None,
    checkpoint: Annotated[
        Path, Parameter(group=_SPARK, help="Directory for temporary files of Spark.")
    ] = Path("tailrace-data/pipeline/checkpoint"),
    heap: Annotated[
        str, Parameter(env_var="TAILRACE_PIPELINE_HEAP", group=_SPARK, help="Memory of the JVM.")
    ] = "1GiB",
    conf: Annotated[
        str,
        Parameter(env_var="TAILRACE_PIPELINE_CONF", group=_SPARK, help="More Spark settings, name=value."),
    ] = "",
    ui: Annotated[bool, Parameter(negative="", group=_SPARK, help="Spark's web pages, on loopback.")] = False,
    task_memory: Annotated[
        str, Parameter(env_var="TAILRACE_PIPELINE_TASK_MEMORY", group=_BATCH, help="Memory of one task.")
    ] = "400MiB",
    batch_segments: Annotated[
        int, Parameter(env_var="TAILRACE_PIPELINE_BATCH_SEGMENTS", group=_BATCH, help="Segments of one job.")
    ] = 64,
    batch_bytes: Annotated[
        str, Parameter(env_var="TAILRACE_PIPELINE_BATCH_BYTES", group=_BATCH, help="Payload of one job.")
    ] = "1GiB",
    reference: Annotated[
        bool, Parameter(negative="", group=_BATCH, help="Use the slow reference implementation, to compare.")
    ] = False,
    supervised: Annotated[int | None, Parameter(show=False)] = None,
) -> int:
    """Run the pipeline."""
    require_spark(master if supervised is None else "sc://")  # the supervisor sets the master
    from tailrace.spark.jobs.pipeline import PipelineOptions
    from tailrace.spark.session import parse_extra_settings

    try:
        options = PipelineOptions(
            master=master,
            jobs=_jobs(jobs),
            once=once,
            store=store,
            directory=checkpoint,
            heap_bytes=parse_size_bytes(heap, "--heap"),
            task_memory_bytes=parse_size_bytes(task_memory, "--task-memory"),
            batch_segments=batch_segments,
            batch_bytes=parse_size_bytes(batch_bytes, "--batch-bytes"),
            ui=ui,
            reference=reference,
            conf=tuple(parse_extra_settings(conf).items()),
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    if supervised is None:
        return _run(with_scheme(endpoint), _token_from(token, token_file), options)
    return _run_supervised(supervised, options)


def _run_supervised(descriptor: int, options: PipelineOptions) -> int:
    from tailrace.spark.jobs.pipeline import ParentPipe
    from tailrace.spark.session import parse_extra_settings

    parent = ParentPipe(descriptor)
    orders = parent.settings
    given: dict[str, Any] = {
        "master": orders.master,
        "store": orders.store,
        "directory": None if orders.directory is None else Path(orders.directory),
        "jobs": None if orders.jobs is None else _jobs(orders.jobs),
        "heap_bytes": orders.heap_bytes,
        "task_memory_bytes": orders.task_memory_bytes,
        "batch_segments": orders.batch_segments,
        "batch_bytes": orders.batch_bytes,
        "group_segments": orders.group_segments,
        "check_ms": orders.check_ms,
        "conf": None if orders.conf is None else tuple(parse_extra_settings(orders.conf).items()),
    }
    options = options._replace(**{name: value for name, value in given.items() if value is not None})
    require_spark(options.master)
    return _run(orders.endpoint, parent.token, options, supervised=orders)


def _run(
    endpoint: str,
    token: Callable[[], str | None],
    options: PipelineOptions,
    *,
    supervised: SupervisorSettings | None = None,
) -> int:
    from tailrace.common.logging_setup import configure_logging
    from tailrace.spark import session
    from tailrace.spark.jobs import pipeline_client as owners
    from tailrace.spark.jobs.pipeline import Pipeline, UnfinishedError

    if options.once:
        require_server(Session(url=endpoint))  # without --once the pipeline may start before its server
    private_files.restrict_umask()
    configure_logging(
        *(("info", "auto") if supervised is None else (supervised.log_level, supervised.log_format))
    )
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs a line for each request
    owner = owners.PipelineClient(endpoint, token)
    pipeline = Pipeline(owner, options, _progress(owner))
    # A stopping server accepts no publications, so its pipeline has nothing to finish.
    signal.signal(signal.SIGTERM, _ending(pipeline.stop if supervised is None else session.exit_quietly))
    session.log_child_output()
    try:
        pipeline.run()
    except KeyboardInterrupt:
        return 130
    except owners.RequestRefusedError as error:
        raise RefusedError(str(error)) from None
    except owners.ServerUnreachableError as error:
        raise UnreachableError(f"no server responds at {endpoint}: {error}") from None
    except UnfinishedError as error:
        raise RefusedError(str(error)) from None
    finally:
        owner.close()
    return 0


def _progress(owner: PipelineClient) -> ProgressListener | None:
    if not sys.stderr.isatty():
        return None

    for name in ("tailrace.pipeline", "tailrace.spark"):
        logging.getLogger(name).setLevel(logging.WARNING)  # the bar shows the rest
    return ProgressBar(owner.backlog_segments)


def _ending(stop: Callable[[], None]) -> Callable[[int, object], None]:
    return lambda _signal, _frame: stop()


def _jobs(text: str) -> tuple[str, ...]:
    chosen = JOBS if text == "all" else tuple(job.strip() for job in text.split(",") if job.strip())
    for job in chosen:
        if job not in JOBS:
            raise UsageError(f"--jobs: {job!r} is not a job: use {', '.join(JOBS)} or all")
    return chosen


def _token_from(token: str | None, file: Path | None) -> Callable[[], str | None]:
    if file is None:
        return lambda: token
    if not file.is_file():
        raise UsageError(f"--token-file: file {file} not found")
    return lambda: file.read_text().strip()
