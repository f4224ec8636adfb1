"""A stream's registry compiled for appends (validation, routing keys) and reads (promotion), with a cache."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.common.caches import LruCache
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.log.decide import AppendRequest
from tailrace.log.model import ReadPart, Stream
from tailrace.log.reader import Page
from tailrace.protocol.http_headers import is_json
from tailrace.schema.json_schema import Validator, compile_schema
from tailrace.schema.json_values import UnusableRecordError, decode_json_record
from tailrace.schema.lenses import LensFailureError
from tailrace.schema.registry import Promoter, Registry, RoutingKeyReader, key_not_allowed, read_registry

SCHEMA_DOCUMENT = "schema"  # key of the document
CACHE_BYTES = 64 * 1024 * 1024  # of documents whose compiled form is cached
# Pages that have to be promoted are smaller, because that runs on the event loop.
PROMOTED_PAGE_BYTES = 128 * 1024
PROMOTED_PAGE_ENTRIES = 1000


class StreamSchema:
    """A compiled registry."""

    def __init__(self, document: bytes, key_bytes_max: int) -> None:
        self.registry: Registry = read_registry(document)
        registry = self.registry
        self._validator: Validator | None = None
        if registry.version:
            self._validator = compile_schema(registry.schemas[registry.version])
        self._rule = (
            None if registry.routing_key is None else RoutingKeyReader(registry.routing_key, key_bytes_max)
        )
        self._promoter = Promoter(registry)

    # -- writing ---------------------------------------------------------------------------------------

    def validate(self, request: AppendRequest) -> Sequence[bytes | None] | None:
        """Reject invalid entries. Returns their keys if the registry has a routing key."""
        self.check_key(request)
        if self._validator is None and self._rule is None:
            return None
        batch = request.lengths is not None
        keys: list[bytes | None] = []
        for index, payload in enumerate(split_append_body(request)):
            where = f"record {index}: " if batch else ""
            try:
                record = decode_json_record(payload)
            except UnusableRecordError as error:
                raise TailraceError("invalid_request", f"{where}(root) {error}") from None
            keys.append(self.validate_record(record, where))
        return keys if self._rule is not None else None

    @property
    def has_routing_key(self) -> bool:
        """Whether the registry has a routing key."""
        return self._rule is not None

    def check_key(self, request: AppendRequest) -> None:
        """Reject a key in the request if keys come from the records."""
        if self._rule is not None and request.key is not None:
            raise key_not_allowed()

    def validate_record(self, record: object, where: str, *, valid: bool = False) -> bytes | None:
        """Reject an invalid record, unless it is known to be valid. Returns its routing key."""
        if self._validator is not None and not valid:
            complaint = self._validator.complaint(record)
            if complaint is not None:
                raise TailraceError("invalid_request", where + complaint)
        return None if self._rule is None else self._rule.key_of(record)

    # -- reading ---------------------------------------------------------------------------------------

    def version_tag(self, page: Page) -> str:
        """The schema version that the bytes of a page depend on; "" if they never change."""
        registry = self.registry
        touched = registry.boundaries and page.next_entry > registry.boundaries[0].offset
        return f"v{registry.version}" if touched else ""

    def needs_promotion_after(self, entry: int) -> bool:
        """Whether some entry behind this one has to be promoted."""
        return self._promoter.needed(entry)  # sequence numbers count from 0

    def promoted(self, stream: Stream, after: int, page: Page) -> Page:
        """A page with its entries promoted; it ends early if that makes it too large."""
        if not self.needs_promotion_after(after):
            return page
        if len(page.parts) != page.count:  # the first schema was installed while the page was read
            raise TailraceError("unavailable", "schema registry changed during the read; retry")
        parts: list[ReadPart] = []
        size = 0
        for entry, part in zip(page.entries(), page.parts, strict=True):
            if size > PROMOTED_PAGE_BYTES:
                return Page(parts, entry - 1, len(parts))
            try:
                parts.append(self._promoter.promote_payload(part, entry - 1))
            except LensFailureError as failure:
                offset = stream.offset(entry)
                raise TailraceError(
                    "invalid_request", f"lens promotion failed at offset {offset}: {failure}"
                ) from None
            size += len(parts[-1])
        return Page(parts, page.next_entry, page.count)


class StreamSchemaCache:
    """LRU cache of compiled registries by document, bounded in bytes."""

    def __init__(self, key_bytes_max: int) -> None:
        self._key_bytes_max = key_bytes_max
        self._cached: LruCache[bytes, StreamSchema] = LruCache(
            size_max=CACHE_BYTES, size_of=lambda document, _: len(document), keep_newest=True
        )

    @property
    def bytes(self) -> int:
        """Size of the cached documents."""
        return self._cached.size

    def clear(self) -> None:
        """Drop all; registries in use are compiled again."""
        self._cached.clear()

    def get(self, documents: dict[str, bytes] | None) -> StreamSchema | None:
        """The compiled registry of a stream; None if it has none."""
        document = None if documents is None else documents.get(SCHEMA_DOCUMENT)
        if document is None:
            return None
        found = self._cached.get(document)  # the same bytes object until it changes: its hash is cached
        if found is None:
            found = StreamSchema(document, self._key_bytes_max)
            self._cached.put(document, found)
        return found

    def page_limits(self, stream: Stream, after: int, limits: Limits) -> tuple[int, int, bool]:
        """How to read a page: most bytes, most entries, and whether entries are separate parts."""
        contract = self.get(stream.visible_documents)
        whole = limits.read_page_bytes, limits.read_page_entries
        if contract is None or not contract.registry.version:
            return *whole, False
        if not contract.needs_promotion_after(after):
            return *whole, True  # a new version may be installed while the page is read
        return min(PROMOTED_PAGE_BYTES, whole[0]), min(PROMOTED_PAGE_ENTRIES, whole[1]), True

    def validate_append(self, request: AppendRequest, stream: Stream) -> Sequence[bytes | None] | None:
        """Validate an append by the stream's registry, if it has one. Returns routing keys."""
        binds_json = stream.content_type is None and is_json(request.content_type)
        contract = self.get(stream.documents) if stream.json or binds_json else None
        return None if contract is None else contract.validate(request)


def split_append_body(request: AppendRequest) -> list[bytes]:
    """The entries of an append."""
    if request.lengths is None:
        return [request.body]
    payloads: list[bytes] = []
    position = 0
    for length in request.lengths:
        payloads.append(request.body[position : position + length])
        position += length + 1
    return payloads
