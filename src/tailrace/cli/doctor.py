"""``tailrace doctor``: check that this machine can run a server well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter
from msgspec import Struct

from tailrace.cli.errors import REFUSED
from tailrace.cli.session import print_json
from tailrace.common.settings import Settings, SettingsError
from tailrace.common.settings_loading import load_settings

Verdict = Literal["ok", "warn", "fail"]

_HELP: Final = """Check that this machine can run a server well, with the settings `tailrace serve` would use.

Looks at Python and its packages, the data directory (writable, free space, how long one fsync takes, another
server's lock), the port, the clock, the limit of open files, the sources that are followed, and whether the
journal and the hot store can be read. The exit code is 1 if something would stop a server; warnings alone
leave it at 0.

For example:

    tailrace doctor

    tailrace doctor --data-dir /var/lib/tailrace --port 5000
"""

_SYNCS: Final = 32
_SYNC_MS_SLOW: Final = 5.0
_MODULES: Final = (
    "apsw", "google_crc32c", "httptools", "jwt", "msgspec", "orjson", "prometheus_client", "rfc8785",
    "sortedcontainers", "uvloop", "websockets", "xxhash",
)  # fmt: skip

command = App(name="doctor", help=_HELP, help_format="markdown")


class Finding(Struct, frozen=True):
    """The result of one check."""

    check: str
    verdict: Verdict
    detail: str


@command.default
def doctor(
    *,
    data_dir: Annotated[str | None, Parameter(help="The data directory.")] = None,
    host: Annotated[str | None, Parameter(help="The address to listen on.")] = None,
    port: Annotated[str | None, Parameter(help="The port to listen on.")] = None,
    json: Annotated[bool, Parameter(negative="", help="Print JSON, one object per line.")] = False,
) -> int:
    import msgspec

    given = {"data_dir": data_dir, "host": host, "port": port}
    failed = False
    for finding in run_checks({name: value for name, value in given.items() if value is not None}):
        failed = failed or finding.verdict == "fail"
        if json:
            print_json(msgspec.structs.asdict(finding))
        else:
            print(f"{finding.verdict:<5} {finding.check:<12} {finding.detail}", flush=True)
    return REFUSED if failed else 0


def run_checks(flags: dict[str, str]) -> Iterator[Finding]:
    """All checks, in an order where the first failure explains later ones."""
    yield _python()
    yield _packages()
    try:
        settings = load_settings(flags)
    except SettingsError as error:
        yield Finding("settings", "fail", str(error))
        return
    yield Finding("settings", "ok", f"preset {settings.preset}")
    yield _exposure(settings)
    checks: tuple[Callable[[Settings], Finding], ...] = (
        _directory,
        _lock,
        _disk,
        _sync,
        _port,
        _files,
        _clock,
        _pipeline,
        _sources,
    )
    for check in checks:
        yield check(settings)
    yield from _stored(settings)


def _python() -> Finding:
    import platform
    import sys

    version = platform.python_version()
    verdict: Verdict = "ok" if sys.version_info >= (3, 11) else "fail"
    return Finding("python", verdict, f"{platform.python_implementation()} {version} on {platform.machine()}")


def _packages() -> Finding:
    import importlib

    missing: list[str] = []
    for name in _MODULES:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        return Finding("packages", "fail", f"missing: {', '.join(missing)}")
    return Finding("packages", "ok", f"{len(_MODULES)} found")


def _exposure(settings: Settings) -> Finding:
    from tailrace.auth import check_listen_address
    from tailrace.common.errors import TailraceError

    try:
        check_listen_address(settings)
    except TailraceError as error:
        return Finding("exposure", "fail", error.message)
    if settings.auth_configured:
        return Finding("exposure", "ok", "requests need a token")
    if settings.loopback_only:
        return Finding("exposure", "ok", "this machine only, no token needed")
    return Finding("exposure", "warn", "all clients that can reach the port have all rights (--insecure)")


def _nearest(directory: Path) -> Path:
    """The directory itself, or where it would be created."""
    path = directory.absolute()
    while not path.exists():
        path = path.parent
    return path


def _directory(settings: Settings) -> Finding:
    import os

    path = _nearest(settings.data_dir)
    shown = settings.data_dir.absolute()
    if not path.is_dir():
        return Finding("data dir", "fail", f"{path} is not a directory")
    if not os.access(path, os.W_OK | os.X_OK):
        return Finding("data dir", "fail", f"{path} cannot be written to")
    return Finding("data dir", "ok", f"{shown}" + ("" if path == shown else " (will be created)"))


def _lock(settings: Settings) -> Finding:
    import fcntl

    path = settings.data_dir / "lock"
    if not path.is_file():
        return Finding("lock", "ok", "no server uses this directory")
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return Finding("lock", "warn", "a server is running on this data directory")
    return Finding("lock", "ok", "no server uses this directory")


def _disk(settings: Settings) -> Finding:
    import shutil

    free = shutil.disk_usage(_nearest(settings.data_dir)).free
    reserve = settings.limits.disk_reserve_bytes
    detail = f"{free / 2**30:.1f} GiB free, appends stop below {reserve / 2**20:.0f} MiB"
    if free < reserve:
        return Finding("disk", "fail", detail)
    return Finding("disk", "warn" if free < 4 * reserve else "ok", detail)


def _sync(settings: Settings) -> Finding:
    """Measure fsync, the lower bound of append latency."""
    import os
    import tempfile

    from tailrace.common.clock import SYSTEM_CLOCK

    taken_ms: list[float] = []
    try:
        with tempfile.TemporaryFile(dir=_nearest(settings.data_dir)) as file:
            for _ in range(_SYNCS):
                os.write(file.fileno(), b"\0" * 4096)
                before = SYSTEM_CLOCK.monotonic()
                os.fdatasync(file.fileno())
                taken_ms.append((SYSTEM_CLOCK.monotonic() - before) * 1000)
    except OSError as error:
        return Finding("fsync", "fail", str(error))
    taken_ms.sort()
    middle, worst = taken_ms[_SYNCS // 2], taken_ms[-1]
    verdict: Verdict = "warn" if middle > _SYNC_MS_SLOW else "ok"
    return Finding("fsync", verdict, f"{middle:.2f} ms median, {worst:.2f} ms maximum, of {_SYNCS}")


def _port(settings: Settings) -> Finding:
    import socket

    address = f"{settings.host}:{settings.port}"
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            return Finding("port", "fail", f"{address}: {error.strerror}")
    return Finding("port", "ok", f"{address} is free")


def _files(settings: Settings) -> Finding:
    import resource

    from tailrace.common import file_descriptors

    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted, fits = settings.limits.connections, file_descriptors.connections_allowed(hard)
    if fits < wanted:
        detail = f"at most {hard:,}: room for {fits:,} of {wanted:,} `connections`; raise ulimit -n"
        return Finding("open files", "warn", detail)
    return Finding("open files", "ok", f"room for {wanted:,} connections")


def _stored(settings: Settings) -> Iterator[Finding]:
    """Read all that a start would replay; a damaged acknowledged record would stop a server."""
    from tailrace.cluster.layout import is_unused_directory, worker_paths
    from tailrace.common.errors import TailraceError
    from tailrace.storage.verify import check_directory

    try:
        paths = [path for path in worker_paths(settings.data_dir) if not is_unused_directory(path)]
    except TailraceError as error:
        yield Finding("journal", "fail", error.message)
        return
    journals, stores = list[str](), list[str]()
    records = streams = 0
    torn = ""
    for path in paths:
        journal, hot = check_directory(path, deep=False)
        journals += [f"{path / 'journal' / file}: {problem}" for file, problem in journal.problems]
        stores += [f"{path / 'hot.db'}: {problem}" for _, problem in hot.problems]
        records, streams = records + journal.records, streams + hot.streams
        torn = ", the last one was cut short by a crash" if journal.torn else torn
    yield _damage("journal", journals) or Finding("journal", "ok", f"{records:,} records to replay{torn}")
    detail = f"{streams:,} streams; 'tailrace verify' reads all of it"
    yield _damage("hot store", stores) or Finding("hot store", "ok", detail)


def _damage(check: str, problems: list[str]) -> Finding | None:
    if not problems:
        return None
    more = f" and {len(problems) - 1} more problems" if problems[1:] else ""
    remedy = "'tailrace salvage' copies what is readable into a new directory"
    return Finding(check, "fail", f"{problems[0]}{more}; {remedy}")


def _pipeline(settings: Settings) -> Finding:
    """Requirements of the local pipeline; a server runs without it."""
    import asyncio
    from importlib.util import find_spec

    from tailrace.server.java import VERSION_MIN, find_java

    if settings.pipeline != "auto":
        return Finding("pipeline", "ok", f"not started here: {settings.pipeline}")
    if find_spec("pyspark") is None:
        return Finding("pipeline", "ok", "the spark extra is not installed; index files are not built")
    java = asyncio.run(find_java())
    if java is None:
        detail = f"no Java {VERSION_MIN}+ found (JAVA_HOME, PATH); index files are not built, searches scan"
        return Finding("pipeline", "warn", detail)
    return Finding("pipeline", "ok", java)


def _sources(settings: Settings) -> Finding:
    """External sources: PostgreSQL retains its log until it is read, MongoDB only for some time."""
    import apsw

    from tailrace.log.journal import JournalCorruptError
    from tailrace.log.records import UNREADABLE_ERRORS
    from tailrace.watch.sources.model import read_source_progress

    if not (settings.data_dir / "journal").is_dir():
        return Finding("sources", "ok", "none")
    try:
        found = read_source_progress(settings.data_dir)
    except (apsw.Error, OSError, JournalCorruptError, *UNREADABLE_ERRORS) as error:
        return Finding("sources", "warn", f"cannot read the data directory: {error}")
    shown = [
        f"{name} {one.phase}" + (f" ({one.reason})" if one.reason else "") for name, one in found.items()
    ]
    if not shown:
        return Finding("sources", "ok", "none")
    served = _lock(settings).verdict == "warn"
    unread = "; no server reads them: PostgreSQL retains its log for us, MongoDB discards its log"
    detail = ", ".join(shown) + ("" if served else unread)
    wrong = not served or any(one.phase == "stale" for one in found.values())
    return Finding("sources", "warn" if wrong else "ok", detail)


def _clock(settings: Settings) -> Finding:
    """Entries have wall time: a time before the newest file means that the clock went back."""
    from tailrace.common.clock import SYSTEM_CLOCK

    now_ns = SYSTEM_CLOCK.now_ns()
    newest_ns = max((file.stat().st_mtime_ns for file in settings.data_dir.glob("journal/*.jnl")), default=0)
    behind_s = (newest_ns - now_ns) / 1e9
    if behind_s > 1:
        return Finding("clock", "warn", f"{behind_s:,.0f} s behind the newest journal file")
    return Finding("clock", "ok", "not behind the data")
