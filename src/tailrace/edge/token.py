"""The edge's own token: read again when its file is another, and set aside while it is good for nothing."""

from __future__ import annotations

import logging
from pathlib import Path

from tailrace.auth import Identity
from tailrace.common.errors import TailraceError

logger = logging.getLogger("tailrace.edge")

TOKEN_BYTES_MAX = 16 * 1024

FileStamp = tuple[int, int, int]


class EdgeToken:
    """One file. While its token is refused or over, the tokens of readers have to do."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._stamp = self._look()
        self.value = self._read()  # as an Authorization header
        self._until_s: float | None = None  # wall time
        self._refused_by: set[str] = set()
        self._told = False

    @property
    def is_refused(self) -> bool:
        return bool(self._refused_by)

    def usable(self, now_s: float) -> bytes | None:
        """The token, unless it is known to be good no more."""
        if self._refused_by or (self._until_s is not None and now_s >= self._until_s):
            return None
        return self.value

    def refresh(self) -> bool:
        """Looks at the file; true if it has another token. One that cannot be read changes nothing."""
        stamp = self._look()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            value = self._read()
        except TailraceError as error:
            logger.error("%s; the one that was read before stays in use", error.message)
            return False
        if value == self.value:
            return False
        self.value = value
        self._until_s = None
        self._refused_by.clear()
        self._told = False
        logger.info("the edge has read another token from %s", self._path)
        return True

    def note_identity(self, identity: Identity) -> None:
        """What the token says of itself. It is given up before its leeway is: others then know in time."""
        self._until_s = identity.expires_at

    def note_answer(self, upstream_id: str, status: int) -> None:
        """An upstream was asked with the token. Only 401 is about the token itself."""
        if status != 401:
            self._refused_by.discard(upstream_id)
            return
        self._refused_by.add(upstream_id)
        if not self._told:
            self._told = True
            logger.warning(
                "upstream %s refuses the edge's own token: put another one into %s. Until then sockets are "
                "opened with the tokens of readers, and neither deletions nor revocations are followed",
                upstream_id,
                self._path,
            )

    def _look(self) -> FileStamp | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                token = file.read(TOKEN_BYTES_MAX).strip()
        except OSError as error:
            raise TailraceError(
                "invalid_request", f"cannot read the token file {self._path}: {error.strerror}"
            ) from None
        if not token:
            raise TailraceError("invalid_request", f"the token file {self._path} is empty")
        return b"Bearer " + token
