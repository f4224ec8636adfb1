"""The file that says which API keys there are and which tokens are good no more.

It is a file of its own, and not a part of the log: the first key has to be there before the first server,
and every process that checks tokens (workers, edges) reads the same one. Whoever changes it holds a lock
beside it and puts a whole new file in its place: readers see it before or after and never in between.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec

from tailrace.auth.api_keys import API_KEYS_MAX, ApiKey
from tailrace.auth.revocations import REVOKED_MAX, RevokedSubject, RevokedToken
from tailrace.common.errors import TailraceError

IDENTITY_FILE_NAME: Final = "identity.json"
IDENTITY_FILE_BYTES_MAX: Final = 32 * 1024 * 1024

FileStamp = tuple[int, int, int]


class IdentityRecords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole content."""

    version: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    keys: Annotated[tuple[ApiKey, ...], msgspec.Meta(max_length=API_KEYS_MAX)] = ()
    tokens: Annotated[tuple[RevokedToken, ...], msgspec.Meta(max_length=REVOKED_MAX)] = ()
    subjects: Annotated[tuple[RevokedSubject, ...], msgspec.Meta(max_length=REVOKED_MAX)] = ()


_decode_records = msgspec.json.Decoder(IdentityRecords).decode


class IdentityFile:
    """One path; nothing is remembered between two calls."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def stamp(self) -> FileStamp | None:
        """Another one after every change; None while there is no file."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read(self) -> IdentityRecords:
        """What the file says; nothing if there is none. OSError or ValueError if it cannot be used."""
        try:
            with self.path.open("rb") as opened:
                content = opened.read(IDENTITY_FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return IdentityRecords()
        if len(content) > IDENTITY_FILE_BYTES_MAX:
            raise ValueError(f"larger than {IDENTITY_FILE_BYTES_MAX} bytes")
        try:
            found = _decode_records(content)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from None
        if len({key.id for key in found.keys}) < len(found.keys):
            raise ValueError("two keys have the same id")
        return found

    def change(self, edit: Callable[[IdentityRecords], IdentityRecords]) -> IdentityRecords:
        """One change by one writer at a time, on disk when this returns. Blocks: not for the event loop."""
        try:
            with self._locked():
                changed = edit(self.read())
                self._replace(msgspec.json.format(msgspec.json.encode(changed), indent=1) + b"\n")
        except (OSError, ValueError) as error:
            raise TailraceError("unavailable", f"{self.path} cannot be changed: {error}") from None
        return changed

    @contextmanager
    def _locked(self) -> Generator[None]:
        lock = self.path.with_name(self.path.name + ".lock")
        made = not lock.exists()
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if made or os.geteuid() == 0:
                self._keep_owner(fd, least=0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _replace(self, content: bytes) -> None:
        if len(content) > IDENTITY_FILE_BYTES_MAX:
            raise ValueError(f"it would be larger than {IDENTITY_FILE_BYTES_MAX} bytes")
        temporary = self.path.with_name(self.path.name + ".tmp")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as opened:
                self._keep_owner(fd)
                opened.write(content)
                opened.flush()
                os.fsync(fd)
            temporary.rename(self.path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _keep_owner(self, fd: int, least: int = 0) -> None:
        """Whoever could read the file before can read the new one: no command of root locks a server out.

        A first file that root makes belongs to whom its directory belongs to.
        """
        try:
            found = self.path.stat()
            mode = stat.S_IMODE(found.st_mode)
        except FileNotFoundError:
            if os.geteuid() != 0:
                return
            found, mode = self.path.parent.stat(), 0o600
        own = os.fstat(fd)
        if (own.st_uid, own.st_gid) != (found.st_uid, found.st_gid):
            try:
                os.fchown(fd, found.st_uid, found.st_gid)
            except PermissionError:
                raise PermissionError(
                    f"it belongs to user {found.st_uid} and group {found.st_gid}, and would no more; "
                    "run this as that user, or as root"
                ) from None
        os.fchmod(fd, mode | least)
