"""`filter=`: a query on one registry's fields, and the sieve that entries of a stream go through."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from tailrace.schema.convert import LensFailureError
from tailrace.schema.promote import Promoter
from tailrace.schema.registry import Registry
from tailrace.search.bind import bind_query
from tailrace.search.compiled import Matcher
from tailrace.search.context_fields import add_context_fields
from tailrace.search.dialect import FILTER_DIALECT
from tailrace.search.view import RecordView

Payload = bytes | memoryview


class RecordFilter:
    """A filter as one registry understands it. Entries count from 1, sequence numbers from 0."""

    def __init__(self, text: str, registry: Registry | None) -> None:
        view: RecordView | None = None
        if registry is not None and registry.search is not None:
            view = add_context_fields(RecordView(registry), text, FILTER_DIALECT)
        query = bind_query(text, None if view is None else view.config, FILTER_DIALECT)
        assert registry is not None
        assert view is not None
        self.text = text
        self.registry = registry
        self.query = query
        self.view = self._view = view
        self._promoter = Promoter(registry)
        self._first_current = self._view.first_current()
        self._matcher = Matcher(query, view.config, registry.version)
        # What matches depends on the registry as well: it goes into the tag of the answer.
        self.mark = xxhash.xxh3_64_hexdigest(registry.to_json())

    def matches(self, entry: int, payload: Payload) -> bool:
        if entry >= self._first_current or self._view.is_current(entry):
            return self._matcher.matches(payload)
        return self._matcher.matches_record(self._view.record(entry, payload))

    def shown(self, entry: int, payload: Payload) -> bytes:
        """The entry as readers get it. One that cannot be promoted has no values, and stays as it is."""
        if entry < self._first_current:
            try:
                payload = self._promoter.promote_payload(payload, entry - 1)
            except LensFailureError:
                pass
        # A copy: a view would keep the whole block it was cut from in memory.
        return bytes(payload)


class FilterScan:
    """What one answer has of a stream so far: the matching entries, and how far everything is decided."""

    __slots__ = (
        "_bytes_left",
        "_entries_left",
        "_filter",
        "_full",
        "_scan_bytes_max",
        "count",
        "decided",
        "parts",
        "scanned_bytes",
        "upto",
    )

    def __init__(
        self,
        chosen: RecordFilter,
        after: int,
        upto: int,
        bytes_max: int,
        entries_max: int,
        scan_bytes_max: int,
    ) -> None:
        self._filter = chosen
        self._bytes_left = bytes_max
        self._entries_left = entries_max
        self._scan_bytes_max = scan_bytes_max
        self._full = False
        self.upto = upto  # later entries may belong to a registry that this filter does not know
        self.decided = after
        self.scanned_bytes = 0
        self.parts: list[Payload] = []
        self.count = 0

    @property
    def mark(self) -> str:
        return self._filter.mark

    @property
    def filter(self) -> RecordFilter:
        return self._filter

    @property
    def filter_bytes(self) -> int:
        return len(self._filter.text)

    @property
    def scan_limit_reached(self) -> bool:
        return self.scanned_bytes >= self._scan_bytes_max

    @property
    def done(self) -> bool:
        return self._full or self.decided >= self.upto or self.scan_limit_reached

    def take(self, entries: Sequence[int], payloads: Sequence[Payload], begin: int, work_bytes: int) -> int:
        """Decides entries from an index on, until some bytes of work are done; answers how far it came."""
        for index in range(begin, len(payloads)):
            entry, payload = entries[index], payloads[index]
            if entry > self.upto:
                self.decided = self.upto  # what lies between has another key
                return index
            if self.done or work_bytes <= 0:
                return index
            if self._filter.matches(entry, payload) and not self._add(entry, payload):
                return index
            self.decided = entry
            self.scanned_bytes += len(payload)
            work_bytes -= len(payload)
        return len(payloads)

    def pass_over(self, entry: int) -> None:
        """Everything up to here is known not to match."""
        self.decided = max(self.decided, min(entry, self.upto))

    def _add(self, entry: int, payload: Payload) -> bool:
        """Whether there was room; the first match always fits."""
        shown = self._filter.shown(entry, payload)
        if self.count and len(shown) > self._bytes_left:
            self._full = True
            return False
        self.parts.append(shown)
        self.count += 1
        self._bytes_left -= len(shown)
        self._entries_left -= 1
        self._full = self._bytes_left <= 0 or self._entries_left <= 0
        return True
