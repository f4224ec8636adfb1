"""The data model of manifests: the head of a stream, its pages, its producers. See docs/formats.md, "Bucket".

The head is the only object of a stream that is ever replaced. Everything it names by key is created once,
under a name with the hash of its content, and never changed. The names of pages and producers also have a
random attempt id: what one attempt left behind is never named by a later one, so the sweep can delete it once
it is old.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TypeVar

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.storage.segments.index_files import IndexFile
from tailrace.storage.segments.model import SegmentInfo

MANIFEST_VERSION = 1
HEAD_KEY = "manifest.json"
NAME_HASH_DIGITS = 16
T = TypeVar("T")


class ManifestError(Exception):
    """Something is wrong with the manifest of one stream."""

    def __init__(self, stream_id: str, message: str) -> None:
        super().__init__(f"stream {stream_id}: {message}")
        self.stream_id = stream_id


class ManifestConflictError(ManifestError):
    """What is recorded and what should be recorded do not fit together. Nothing was changed."""


class ManifestCorruptError(ManifestError):
    """An object of the manifest is not what was written."""


class StreamDeletedError(ManifestError):
    """The stream was deleted; its tombstone accepts no segments."""


class FencedError(TailraceError):
    """Another server owns the bucket. This one must not write to it any more."""

    def __init__(self, message: str) -> None:
        super().__init__("unavailable", message)


class RecordedLifetime(msgspec.Struct, frozen=True):
    """The lifetime of a stream, as its headers set it."""

    ttl_s: int | None = None
    expires_ns: int | None = None
    retention_s: int | None = None
    retention_bytes: int | None = None


class HeadTombstone(msgspec.Struct, frozen=True):
    """A tombstone: a later stream of the name continues with a higher epoch."""

    at_ns: int
    reason: str  # "deleted" or "expired"
    epoch: int


class ForkParent(msgspec.Struct, frozen=True):
    """The source of a fork."""

    stream_id: str
    name: str


class StreamFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a stream in one snapshot, `tail` being its last entry there.

    `closed` to `size_bytes` and the producers are valid at `tail` only. They are recorded when the segments
    reach that far: if a producer were restored ahead of its entries, its retries would be taken for
    duplicates. `as_of` numbers the snapshots of one owner: an older one never replaces a newer one.
    """

    name: str
    stream_id: str
    incarnation: int
    epochs: tuple[tuple[int, int], ...]
    created_ns: int
    tail: int
    as_of: int = 0
    content_type: str | None = None
    lifetime: RecordedLifetime = RecordedLifetime()
    asked: RecordedLifetime = RecordedLifetime()
    touched_ns: int = 0
    parent: ForkParent | None = None
    fork_entry: int = 0
    fork_sub: int = 0
    forks: int = 0
    gone: bool = False
    gone_reason: str = ""
    meta_keys: tuple[str, ...] = ()
    closed: bool = False
    closed_by: tuple[str, int, int] | None = None
    seq: bytes | None = None
    tail_ns: int = 0
    size_bytes: int = 0


CONFIGURATION_FIELDS = (
    "name", "incarnation", "epochs", "created_ns", "as_of", "content_type", "lifetime", "asked", "touched_ns",
    "parent", "fork_entry", "fork_sub", "forks", "gone", "gone_reason", "meta_keys",
)  # fmt: skip
TAIL_STATE_FIELDS = ("tail", "closed", "closed_by", "seq", "tail_ns", "size_bytes")


class SegmentPageRef(msgspec.Struct, frozen=True, array_like=True):
    """One page as the head, or a page of pages, names it. The order never changes."""

    key: str
    first: int
    last: int
    sha256: str
    level: int  # 0: a page of segments; n: a page of pages of level n - 1
    segments: int
    bytes: int  # of the segments' files


class SegmentPage(msgspec.Struct, frozen=True, kw_only=True):
    """Either segments or pages, in the order of their entries."""

    version: int = MANIFEST_VERSION
    attempt: str
    level: int = 0
    segments: tuple[SegmentInfo, ...] = ()
    pages: tuple[SegmentPageRef, ...] = ()


class IndexFilePageRef(msgspec.Struct, frozen=True, array_like=True):
    """A page of index files as the head, or a page of pages, names it. The field order never changes."""

    key: str
    first: int  # the first entry that one of them covers
    last: int
    sha256: str
    level: int  # 0: a page of index files; n: a page of pages of level n - 1
    index_files: int
    bytes: int  # of their files


class IndexFilePage(msgspec.Struct, frozen=True, kw_only=True):
    """Either index files or pages of them, in order of publication."""

    version: int = MANIFEST_VERSION
    attempt: str
    level: int = 0
    index_files: tuple[IndexFile, ...] = msgspec.field(name="companions", default=())
    pages: tuple[IndexFilePageRef, ...] = ()


class RetiredObject(msgspec.Struct, frozen=True, array_like=True):
    """An object that is no longer listed, and stays for a while for readers of an older manifest."""

    object: str
    generation: int  # of the manifest that no longer lists it
    at_ns: int


class ReplacedRange(msgspec.Struct, frozen=True, array_like=True):
    """Entries whose segments were merged. The old objects stay for readers of an older manifest."""

    first: int
    last: int
    at_ns: int


class RecordedProducers(msgspec.Struct, frozen=True, kw_only=True):
    """The last epoch and sequence of each idempotent producer, as of `uploaded_through`."""

    version: int = MANIFEST_VERSION
    attempt: str
    producers: dict[str, tuple[int, int]]


class ManifestHead(StreamFacts, frozen=True, kw_only=True):
    """The manifest's head. `tail` is the entry of its state: nearly always `uploaded_through`."""

    version: int = MANIFEST_VERSION
    fence: int = 0
    generation: int = 0
    deleted: HeadTombstone | None = None
    earliest: int = 0  # entries up to this one were trimmed by retention
    uploaded_through: int = 0
    pages: tuple[SegmentPageRef, ...] = ()
    segments: tuple[SegmentInfo, ...] = ()
    producers_key: str | None = None
    producers_sha256: str = ""  # of the producers alone, to see whether they changed
    index_file_pages: tuple[IndexFilePageRef, ...] = msgspec.field(name="companion_pages", default=())
    index_files: tuple[IndexFile, ...] = msgspec.field(name="companions", default=())
    retired: tuple[RetiredObject, ...] = ()
    replaced: tuple[ReplacedRange, ...] = ()

    @property
    def epoch(self) -> int:
        return self.epochs[-1][0]

    @property
    def segment_count(self) -> int:
        return sum(page.segments for page in self.pages) + len(self.segments)

    @property
    def index_file_count(self) -> int:
        return sum(page.index_files for page in self.index_file_pages) + len(self.index_files)

    @property
    def index_file_bytes(self) -> int:
        return sum(page.bytes for page in self.index_file_pages) + sum(one.bytes for one in self.index_files)

    @property
    def segment_bytes(self) -> int:
        return sum(page.bytes for page in self.pages) + sum(info.bytes for info in self.segments)


def encode_manifest(
    value: ManifestHead | SegmentPage | IndexFilePage | RecordedProducers | dict[str, tuple[int, int]],
) -> bytes:
    """Canonical encoding: the same content is the same bytes, so that hashes in names are comparable."""
    return msgspec.json.encode(value, order="sorted")


def decode_manifest(data: bytes, kind: type[T], stream_id: str, key: str) -> T:
    try:
        found = msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:  # also values of the wrong type
        raise ManifestCorruptError(stream_id, f"{key} cannot be read: {error}") from None
    version: int = getattr(found, "version", MANIFEST_VERSION)
    if version > MANIFEST_VERSION:
        message = f"{key} was written by a newer version of Tailrace (format {version})"
        raise ManifestCorruptError(stream_id, message)
    return found


def segment_page_key(first: int, last: int, sha256: str) -> str:
    return f"manifest/{first:020}-{last:020}.{sha256[:NAME_HASH_DIGITS]}.json"


def index_file_page_key(first: int, last: int, sha256: str) -> str:
    return f"catalogue/{first:020}-{last:020}.{sha256[:NAME_HASH_DIGITS]}.json"


def producers_key(generation: int, sha256: str) -> str:
    return f"producers/{generation:010}.{sha256[:NAME_HASH_DIGITS]}.json"


def new_attempt_id() -> str:
    return secrets.token_hex(8)


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
