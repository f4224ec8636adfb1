"""A file of a family as the catalogue names it."""

from __future__ import annotations

from typing import NamedTuple

from tailrace.storage.object_store.cache import ObjectRange, cache_source
from tailrace.storage.object_store.request_stats import stream_and_artifact


class UnusableFileError(Exception):
    """A file that is not what was published, or not in a form that is known here."""


class IndexFileRef(NamedTuple):
    """An object as the catalogue names it."""

    key: str  # from the root of the store
    stream_id: str
    bytes: int
    sha256: str

    @property
    def artifact(self) -> str:
        """What kind of object it is."""
        _, artifact = stream_and_artifact(self.key) or ("", "")
        return artifact

    def part(self, start: int, stop: int) -> ObjectRange:
        return ObjectRange(cache_source(self.key), start, stop)
