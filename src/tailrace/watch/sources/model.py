"""What every source gives: changes with a position, in the order in which they were committed there."""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

_TOKEN: Final = re.compile(r"([0-9a-f]{16})/(-1|[0-9]{1,18})\Z")


class SourcePosition(NamedTuple):
    """How far a source has been read: the commit, the message inside it, and the number of the last change.

    A message can be several changes (a key that changes is a delete and an insert) and then `change`, which
    counts those, is ahead of `ordinal`, which counts messages.
    """

    lsn: int
    ordinal: int
    change: int

    @property
    def token(self) -> str:
        """The position as a source's resume token."""
        return f"{self.lsn:016x}/{self.ordinal}"

    @property
    def place(self) -> tuple[int, int]:
        return self.lsn, self.ordinal


START_POSITION: Final = SourcePosition(0, -1, -1)


# full: as the change left it. lookup: as somebody found it later. missing: it was gone when it was looked up.
ImageKind = Literal["full", "lookup", "missing"]


class SourceChange(NamedTuple):
    """One change as the source says it.

    put: the document is now `data`; the fields in `unchanged` are what they were (in the document `was`, if
    its key was another one). delete: it is gone. clear: all documents of the collection are gone.
    A source whose places have names of their own says them in `token`; one that knows what the document was
    before says it in `before`.
    """

    lsn: int
    ordinal: int
    txn: str | None
    time: str
    op: Literal["put", "delete", "clear"]
    collection: str
    key: str = ""
    data: bytes = b""
    unchanged: tuple[str, ...] = ()
    was: str | None = None
    token: str = ""
    image: ImageKind = "full"
    before: bytes | None = None
    replaces: bool = False  # the whole document was given, not some of its fields


class GapError(Exception):
    """The source cannot go on from where it was: what happened in between is not known."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SourceError(Exception):
    """The source cannot be read as it is set up; the message says what to do about it."""


def read_position_token(token: str) -> tuple[int, int] | None:
    found = _TOKEN.match(token)
    return None if found is None else (int(found[1], 16), int(found[2]))


def format_lsn(lsn: int) -> str:
    """A position as changes carry it: the order of the texts is the order of the positions."""
    return f"{lsn:016x}"
