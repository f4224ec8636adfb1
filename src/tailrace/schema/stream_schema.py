"""What a stream's registry means for those who write to it and read from it: made once, used often."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

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
CACHE_BYTES = 64 * 1024 * 1024  # of documents whose contracts are kept
# A page that has to be promoted is smaller: that is done on the loop.
PROMOTED_PAGE_BYTES = 128 * 1024
PROMOTED_PAGE_ENTRIES = 1000


class StreamSchema:
    """A registry, ready for use."""

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

    def check(self, request: AppendRequest) -> Sequence[bytes | None] | None:
        """Refuses entries that do not fit; gives their keys if the registry says where they are."""
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
            keys.append(self.judge(record, where))
        return keys if self._rule is not None else None

    @property
    def has_rule(self) -> bool:
        """Whether the registry says where keys are."""
        return self._rule is not None

    def check_key(self, request: AppendRequest) -> None:
        """A request has no say in keys that the records have."""
        if self._rule is not None and request.key is not None:
            raise key_not_allowed()

    def judge(self, record: object, where: str, *, valid: bool = False) -> bytes | None:
        """Refuses one record that does not fit, unless it is known to; its key, if there is a rule."""
        if self._validator is not None and not valid:
            complaint = self._validator.complaint(record)
            if complaint is not None:
                raise TailraceError("invalid_request", where + complaint)
        return None if self._rule is None else self._rule.key_of(record)

    # -- reading ---------------------------------------------------------------------------------------

    def mark(self, page: Page) -> str:
        """What the bytes of a page depend on beside its entries; "" if they will never be others."""
        registry = self.registry
        touched = registry.boundaries and page.next_entry > registry.boundaries[0].offset
        return f"v{registry.version}" if touched else ""

    def promotes_behind(self, entry: int) -> bool:
        """Whether some of the entries behind this one are shown in another form than they are stored."""
        return self._promoter.needed(entry)  # sequence numbers count from 0

    def promoted(self, stream: Stream, after: int, page: Page) -> Page:
        """A page with each entry apart, as readers get it. It ends early if it grows too large by that."""
        if not self.promotes_behind(after):
            return page
        if len(page.parts) != page.count:  # the first schema came while the page was read
            raise TailraceError("unavailable", "the schema registry changed; read again")
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
    """Contracts by their documents, least recently used out first, bounded in bytes."""

    def __init__(self, key_bytes_max: int) -> None:
        self._key_bytes_max = key_bytes_max
        self._kept: OrderedDict[bytes, StreamSchema] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Size of the documents whose contracts are kept."""
        return self._bytes

    def clear(self) -> None:
        """Those that are needed are made again."""
        self._kept.clear()
        self._bytes = 0

    def of(self, documents: dict[str, bytes] | None) -> StreamSchema | None:
        """The contract in a stream's documents; None if it has no registry."""
        document = None if documents is None else documents.get(SCHEMA_DOCUMENT)
        if document is None:
            return None
        found = self._kept.get(document)  # the same object until it changes: its hash is known
        if found is not None:
            self._kept.move_to_end(document)
            return found
        found = self._kept[document] = StreamSchema(document, self._key_bytes_max)
        self._bytes += len(document)
        while self._bytes > CACHE_BYTES and len(self._kept) > 1:
            self._bytes -= len(self._kept.popitem(last=False)[0])
        return found

    def page_of(self, stream: Stream, after: int, limits: Limits) -> tuple[int, int, bool]:
        """How a page is read: bytes and entries at most, and whether each entry is apart."""
        contract = self.of(stream.visible_documents)
        whole = limits.read_page_bytes, limits.read_page_entries
        if contract is None or not contract.registry.version:
            return *whole, False
        if not contract.promotes_behind(after):
            return *whole, True  # a new version may come while the page is read
        return min(PROMOTED_PAGE_BYTES, whole[0]), min(PROMOTED_PAGE_ENTRIES, whole[1]), True

    def guard(self, request: AppendRequest, stream: Stream) -> Sequence[bytes | None] | None:
        """What the sequencer asks when all else about an append is in order."""
        binds_json = stream.content_type is None and is_json(request.content_type)
        contract = self.of(stream.documents) if stream.json or binds_json else None
        return None if contract is None else contract.check(request)


def split_append_body(request: AppendRequest) -> list[bytes]:
    """The entries of an append, each apart."""
    if request.lengths is None:
        return [request.body]
    payloads: list[bytes] = []
    position = 0
    for length in request.lengths:
        payloads.append(request.body[position : position + length])
        position += length + 1
    return payloads
