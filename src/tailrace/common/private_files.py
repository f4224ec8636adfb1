"""Files and directories for the user of the process only: they hold what not every local user may read.

Here, and not with the data directory, because an edge has files of its own and knows nothing of the store.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Final

DIRECTORY_MODE: Final = 0o700
FILE_MODE: Final = 0o600
OTHER_USERS_MODE: Final = 0o077


def restrict_umask() -> None:
    """Whatever this process and its children make from now on, by whichever library, is private."""
    os.umask(OTHER_USERS_MODE)


def make_private_directory(path: Path) -> None:
    """A directory that is used for nothing else. One that is there is taken from other users."""
    path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    restrict_to_owner(path, DIRECTORY_MODE)


def restrict_to_owner(path: Path, mode: int) -> None:
    """Takes what an older version has left open from other users.

    Nothing happens if it is not there, or belongs to another user, as the root of a mounted disk does: what
    is made in it is private all the same.
    """
    try:
        if path.stat().st_mode & OTHER_USERS_MODE:
            path.chmod(mode)
    except (FileNotFoundError, PermissionError):
        return


def create_private_file(path: Path) -> BinaryIO:
    """A new file, open for writing."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE), "wb")


def open_lock_file(path: Path) -> BinaryIO:
    """A file to be locked, made if it is not there."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE), "r+b")
