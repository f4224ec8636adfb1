"""One stream in any state, and every kind of query held against the plain model: searches, filtered and
keyed reads, aggregates and the listing of keys.
"""

from __future__ import annotations

import asyncio
import time
from functools import cache
from typing import Any

import orjson
from hypothesis import strategies as st
from hypothesis.stateful import rule

from support.aggregate_model import INTERVALS, ROLLUPS, AggregateModel, rollup_view
from support.log_model import Append
from support.queries import FILTERS, Question, payload_of, questions
from support.search_states import FAR_S, SearchStates, actions, queries
from tailrace.common.limits import Limits
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Settings
from tailrace.log.model import Stream
from tailrace.log.routing_keys import KeyListing, LexiconReader
from tailrace.routing.context import Context
from tailrace.search.aggregates.run import Aggregator
from tailrace.search.filtered_reads import FilteredReads
from tailrace.search.records import RecordView
from tailrace.search.requests import bind_aggregate, parse_aggregate

KEYS: list[bytes | None] = [None, b"a", b"B", "á".encode(), "😀".encode(), b"ab"]
NOON = 1767225600000
PAGE = Limits(read_page_bytes=200, read_page_entries=3, filter_scan_bytes=300)
WHOLE = {"from": -10, "to": NOON + 4_000_000}

filters = st.tuples(questions(FILTERS), st.sampled_from([None, *KEYS]), st.booleans())


@st.composite
def aggregates(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(sorted(ROLLUPS)))
    bounds = st.sampled_from([WHOLE, {"from": NOON - 1, "to": NOON + 2}, {"from": 5, "to": NOON}])
    groups = st.lists(st.sampled_from(ROLLUPS[name]["dimensions"]), unique=True)
    return {
        "rollup": name,
        "interval": draw(st.sampled_from(INTERVALS)),
        "group_by": draw(groups),
        **draw(bounds),
    }


class QueryStates(SearchStates):
    """As its base; a batch has one key, and after every action one query of each kind is compared."""

    lexicons: LexiconReader | None = None

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[bytes | None] = []

    @rule(action=actions(), query=queries(), narrowed=filters, body=aggregates(), limit=st.integers(1, 4))
    def act(
        self,
        action: tuple[Any, ...],
        query: tuple[Any, ...],
        narrowed: tuple[Question, bytes | None, bool],
        body: dict[str, Any],
        limit: int,
    ) -> None:
        getattr(self, action[0])(*action[1:])
        self.search(*query)
        self.walk(*narrowed)
        self.aggregate(body)
        self.list_keys(limit)

    def append(self, batch: list[Any], ascii_only: bool) -> None:
        payloads = [payload_of(record, ascii_only=ascii_only) for record in batch]
        key = KEYS[len(b"".join(payloads)) % len(KEYS)]
        pending = self.real.append("s", Append(payloads, "application/json", key=key))
        self.real.settle()
        assert pending.code is None
        self.payloads += payloads
        self.keys += [key] * len(payloads)

    def forget_after(self, sealed: int) -> None:
        super().forget_after(sealed)
        del self.keys[sealed:]

    @property
    def view(self) -> RecordView:
        return view_at(self.evolved_at)

    @property
    def shown(self) -> list[int]:
        """The entries that retention has left."""
        return list(range(self.stream.earliest + 1, len(self.payloads) + 1))

    # -- the kinds of queries ----------------------------------------------------------------------------

    def walk(self, question: Question, key: bytes | None, inline: bool) -> None:
        """A filtered read, perhaps of one key; and the keyed read alone."""
        view, stream = self.view, self.stream
        keyed = [entry for entry in self.shown if key is None or self.keys[entry - 1] == key]
        records = {entry: view.record(entry, self.payloads[entry - 1]) for entry in keyed}
        if view.version == 2:
            records = {entry: _as_before(record) for entry, record in records.items()}
        holds = [entry for entry in keyed if question.holds(records[entry])]
        found = self.real.run(self._filtered(stream, view, question.text, key, inline))
        assert len(found) == len(holds)
        if view.version == 1:
            assert found == [self.payloads[entry - 1] for entry in holds]
        page = self.real.read(stream, stream.earliest, 1 << 20, 10_000, key, apart=True)
        assert list(page.entries()) == keyed

    async def _filtered(
        self, stream: Stream, view: RecordView, text: str, key: bytes | None, inline: bool
    ) -> list[bytes]:
        real = self.real
        context = Context(Settings(limits=PAGE), real.log, real.clock, real.loop, ServerMetrics(), "model")
        reads = FilteredReads(context, lambda _stream: view.registry, self.searcher.catalogue)
        found: list[bytes] = []
        at, until = stream.earliest, asyncio.get_running_loop().time() + FAR_S
        while at < stream.visible:
            sieve = reads.begin(stream, text, at, 0)
            if not (inline and reads.try_scan(stream, sieve, key)):
                await reads.scan(stream, sieve, key, until)
            assert sieve.decided > at
            found += map(bytes, sieve.parts)
            at = sieve.decided
        reads.close()
        return found

    def aggregate(self, body: dict[str, Any]) -> None:
        view = self.view
        request = bind_aggregate(parse_aggregate(body), view.config)
        until = time.monotonic() + FAR_S
        run = Aggregator(self.searcher).aggregate(self.stream, view, request, until)
        answer = orjson.loads(self.real.run(run))
        assert answer["coverage"]["complete"]
        records = [view.record(entry, self.payloads[entry - 1]) for entry in self.shown]
        AggregateModel(records, view).check(body, answer)

    def list_keys(self, limit: int) -> None:
        listing = self.real.call(KeyListing, self.real.log, self.lexicons)
        found: list[bytes] = []
        more = True
        while more:
            after = found[-1] if found else None
            page = self.real.run(listing.page(self.stream, after, limit, FAR_S))
            found += page.keys
            more = page.more
        used = {self.keys[entry - 1] for entry in self.shown} - {None}
        assert found == sorted(key for key in used if key is not None)


def _as_before(record: Any) -> Any:
    """Questions look for `id` where version 1 had it: version 2 has it elsewhere."""
    if not isinstance(record, dict):
        return record
    kept = {name: value for name, value in record.items() if name != "id"}
    return {**kept, "id": record["renamed"]} if "renamed" in record else kept


@cache
def view_at(evolved_at: int | None) -> RecordView:
    return rollup_view(evolved_at)
