"""Files and directories that only the user of the process may access.

They are apart from the data directory because an edge uses them without knowing the store.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

DIRECTORY_MODE: Final = 0o700
FILE_MODE: Final = 0o600
OTHER_USERS_MODE: Final = 0o077


def restrict_umask() -> None:
    """Make all files that this process and its children create private, libraries included."""
    os.umask(OTHER_USERS_MODE)


def make_private_directory(path: Path) -> None:
    """Create a directory for this process only; an existing one is restricted to the owner."""
    path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    restrict_to_owner(path, DIRECTORY_MODE)


def restrict_to_owner(path: Path, mode: int) -> None:
    """Restrict a file or directory that an older version created with wider permissions.

    Does nothing if it does not exist or belongs to another user, such as the root of a mounted disk: files
    created in it are private anyway.
    """
    try:
        if path.stat().st_mode & OTHER_USERS_MODE:
            path.chmod(mode)
    except (FileNotFoundError, PermissionError):
        return


def create_private_file(path: Path) -> BinaryIO:
    """Create a file and open it for writing."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE), "wb")


def open_lock_file(path: Path) -> BinaryIO:
    """Open a lock file, creating it if needed."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE), "r+b")


def replace_file(path: Path, content: bytes, *, prepare: Callable[[int], None] | None = None) -> None:
    """Replace a file durably: after a crash it has the old content or the new one.

    `prepare` gets the descriptor of the new file before there is anything in it.
    """
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        with create_private_file(temporary) as opened:
            if prepare is not None:
                prepare(opened.fileno())
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
