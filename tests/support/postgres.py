"""A real PostgreSQL for tests: a cluster of its own on loopback, ended as machines end it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, LiteralString

import psycopg

from support.ports import KeptPort

START_S_MAX = 60.0
STOP_S_MAX = 30.0
USER = "tailrace"
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "wal_level": "logical",
    "max_wal_senders": "4",
    "max_replication_slots": "64",
    "max_connections": "40",
    "shared_buffers": "16MB",
    # What is lost with a machine's power is not what these tests are about.
    "fsync": "off",
    "full_page_writes": "off",
    "log_min_messages": "fatal",
    "autovacuum": "off",
}


def binaries() -> Path:
    """Where `initdb` and `postgres` are; Debian keeps them out of the PATH."""
    found = shutil.which("postgres")
    if found is not None:
        return Path(found).parent
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    assert places, "no PostgreSQL on this machine: apt-get install postgresql"
    return places[-1].parent


class PostgresServer:
    """One cluster in a directory of its own. It does not run as root, so as root it gets another user."""

    def __init__(self, **settings: str) -> None:
        self._settings = {**_SETTINGS, **settings}
        self._binaries = binaries()
        self.directory = Path(tempfile.mkdtemp(prefix="tailrace-pg-"))
        self._owner = _owner()
        if self._owner is not None:
            os.chown(self.directory, self._owner.pw_uid, self._owner.pw_gid)
        self._kept = KeptPort()
        self.port = self._kept.number
        self._process: subprocess.Popen[bytes] | None = None
        self._made = False

    @property
    def dsn(self) -> str:
        return f"host=127.0.0.1 port={self.port} user={USER} dbname=postgres"

    def start(self) -> PostgresServer:
        if not self._made:
            self._run(
                "initdb",
                "-D",
                "data",
                "-U",
                USER,
                "-A",
                "trust",
                "-E",
                "UTF8",
                "--no-sync",
                "--no-instructions",
            )
            self._made = True
        settings = {"unix_socket_directories": str(self.directory), "port": str(self.port), **self._settings}
        flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        deadline = time.monotonic() + START_S_MAX
        self._process = self._spawn("postgres", "-D", "data", *flags)
        while not self._answers():
            assert time.monotonic() < deadline, "PostgreSQL does not start"
            if self._process.poll() is not None:
                # Those who served the one before may take a moment to notice that it is gone.
                self._process = self._spawn("postgres", "-D", "data", *flags)
            time.sleep(0.05)
        return self

    def crash(self) -> None:
        """Every process of it ends at once, nothing is written any more."""
        self._end(signal.SIGQUIT)

    def stop(self) -> None:
        if self._process is not None:
            self._end(signal.SIGINT)
        shutil.rmtree(self.directory, ignore_errors=True)

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self.dsn, autocommit=True, connect_timeout=10)

    def run(self, query: LiteralString, *values: object) -> list[tuple[Any, ...]]:
        with self.connect() as connection:
            cursor = connection.execute(query, values or None)
            return cursor.fetchall() if cursor.description is not None else []

    def _answers(self) -> bool:
        with suppress(psycopg.OperationalError):
            self.run("SELECT 1")
            return True
        return False

    def _end(self, how: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(STOP_S_MAX)
        self._process = None

    def _spawn(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        command: Sequence[Path | str] = [self._binaries / program, *arguments]
        started: Any = subprocess.Popen(command, **self._as_owner(), start_new_session=True)
        return started

    def _run(self, program: str, *arguments: str) -> None:
        command: Sequence[Path | str] = [self._binaries / program, *arguments]
        subprocess.run(command, check=True, **self._as_owner())

    def _as_owner(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "cwd": self.directory,
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
            "env": {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8", "HOME": str(self.directory)},
        }
        if self._owner is not None:
            found |= {"user": self._owner.pw_uid, "group": self._owner.pw_gid, "extra_groups": []}
        return found


def _owner() -> pwd.struct_passwd | None:
    """Whoever the cluster belongs to, if it cannot be us."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise AssertionError("PostgreSQL does not run as root, and there is nobody else")
