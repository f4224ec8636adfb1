"""The data directory: its lock (one server at a time), format version and identity."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from pathlib import Path

from tailrace.common import private_files
from tailrace.common.errors import TailraceError
from tailrace.common.private_files import replace_file, sync_directory

DIRECTORY_VERSION = 1
# The streams are in the directories of several workers, where an older server would not find them.
DIRECTORY_VERSION_SHARED = 2
LOCK_WAIT_S = 5.0
# The content of the directory. Older versions left these readable by other users.
SUBDIRECTORIES = ("cache", "journal", "spool")


class DataDirectory:
    """Holds the lock while the process is running."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True, mode=private_files.DIRECTORY_MODE)
            sync_directory(path.parent)
        except OSError as error:
            raise TailraceError(
                "unavailable", f"cannot use {path} as data directory: {error.strerror}"
            ) from error
        self._lock_fd = self._lock()
        self._check_version()
        for name in SUBDIRECTORIES:
            private_files.restrict_to_owner(path / name, private_files.DIRECTORY_MODE)
        self.deployment = self._deployment()

    def close(self) -> None:
        os.close(self._lock_fd)

    def _lock(self) -> int:
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                # A server that was just killed may still be releasing the lock.
                if time.monotonic() > deadline:
                    os.close(fd)
                    raise TailraceError(
                        "unavailable", f"another server uses the data directory {self.path}"
                    ) from None
                time.sleep(0.05)
            else:
                return fd

    def _check_version(self) -> None:
        file = self.path / "VERSION"
        if not file.exists():
            replace_file(file, b"%d\n" % DIRECTORY_VERSION)
            return
        found = file.read_text().strip()
        if not found.isdigit() or int(found) > DIRECTORY_VERSION_SHARED:
            raise TailraceError(
                "unavailable",
                f"the data directory has format {found!r}; "
                f"this version supports {DIRECTORY_VERSION_SHARED} and older",
            )

    def become_shared(self) -> None:
        """From now on only servers that support workers may use the directory."""
        replace_file(self.path / "VERSION", b"%d\n" % DIRECTORY_VERSION_SHARED)

    def become_new(self) -> None:
        """A new identity: a server with the old one becomes another deployment."""
        replace_file(self.path / "deployment", _new_deployment())
        self.deployment = self._deployment()

    def _deployment(self) -> str:
        file = self.path / "deployment"
        if not file.exists():
            replace_file(file, _new_deployment())
        return file.read_text().strip()


def make_directory(path: Path) -> None:
    """Creates a directory durably, so that synced files in it survive a crash."""
    private_files.make_private_directory(path)
    sync_directory(path.parent)


def _new_deployment() -> bytes:
    return secrets.token_hex(8).encode() + b"\n"
