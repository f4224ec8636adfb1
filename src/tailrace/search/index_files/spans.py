"""Spans of entries covered by the same index files, and which of the files a query needs.

A file of an older plan serves the fields whose fingerprints have not changed since. Files of different
families may cover different ranges, and merged ones many segments: a span begins wherever some file begins or
ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from tailrace.search.index_files.file_cache import IndexFileRef
from tailrace.search.index_files.format import AGG, COL, EXACT, FTS, MBLK
from tailrace.search.index_files.index_plan import family_members, index_plan
from tailrace.search.matching import RowMatches, match_rows
from tailrace.search.query_language import (
    All,
    AnyOf,
    Anywhere,
    BoundQuery,
    Clause,
    Compares,
    Equals,
    HasValue,
    Negation,
    Phrase,
    StartsWith,
    Words,
)
from tailrace.search.records import RecordView, excludes_bounds
from tailrace.storage.segments.index_files import IndexFile, PlanRecord
from tailrace.storage.segments.model import stream_prefix

SEARCH_FAMILIES = (COL, EXACT, FTS)
ROW_FAMILIES = (*SEARCH_FAMILIES, MBLK)  # have data of single entries


class UsableFile(NamedTuple):
    """An index file and the part of it that agrees with the current registry."""

    index_file: IndexFile
    published: IndexFileRef
    names: frozenset[str]  # of fields or rollups
    is_current: bool  # all of it agrees, including its statistics


class IndexSpan(NamedTuple):
    first: int
    last: int
    is_range: bool  # every number from first to last is an entry
    files: Mapping[str, Sequence[UsableFile]]  # by family
    primary: tuple[int, int] | None  # smallest and largest primary timestamp, if known
    is_complete: bool  # has all search families of the current plan

    def serving(self, family: str, name: str) -> UsableFile | None:
        for served in self.files.get(family, ()):
            if name in served.names:
                return served
        return None


class FieldFingerprints:
    """Fingerprints of the fields, rollups and families that a registry defines."""

    def __init__(self, view: RecordView) -> None:
        # Metric blocks exist only with the metrics profile, and then have this fingerprint.
        self._prints = index_plan(view.registry, "metrics").fingerprints
        assert view.registry.search is not None
        search = view.registry.search
        self._members = {family: frozenset(found) for family, found in family_members(search).items()}
        self._members[MBLK] = frozenset({MBLK})
        if view.primary is not None and COL in self._members:
            self._members[COL] |= {view.primary}

    @property
    def searched(self) -> list[str]:
        """The families that searches use."""
        return [family for family in SEARCH_FAMILIES if family in self._members]

    def served(self, index_file: IndexFile, plan: PlanRecord | None, stream_id: str) -> UsableFile | None:
        """The usable part of a file; None if there is none."""
        family = index_file.family
        current = index_file.fingerprint != "" and index_file.fingerprint == self._prints.get(
            f"family:{family}"
        )
        names = self._members.get(family, frozenset())
        if not current:
            kind = "rollup" if family == AGG else "field"
            old = {} if plan is None else plan.fingerprints
            names = frozenset(name for name in names if self._same(f"{kind}:{name}", old))
        if not names:
            return None
        key = stream_prefix(stream_id) + index_file.object
        published = IndexFileRef(key, stream_id, index_file.bytes, index_file.sha256)
        return UsableFile(index_file, published, names, current)

    def _same(self, name: str, old: Mapping[str, str]) -> bool:
        return name in self._prints and old.get(name) == self._prints[name]


def build_spans(
    prints: FieldFingerprints,
    index_files: Iterable[IndexFile],
    plans: Mapping[str, PlanRecord],
    stream_id: str,
) -> list[IndexSpan]:
    """The spans that some file with data of single entries covers, in order and without overlaps."""
    begins: dict[int, list[UsableFile]] = {}
    edges: set[int] = set()
    for index_file in index_files:
        if index_file.family not in ROW_FAMILIES:
            continue
        served = prints.served(index_file, plans.get(index_file.plan_hash), stream_id)
        if served is not None:
            begins.setdefault(index_file.first, []).append(served)
            edges |= {index_file.first, index_file.last + 1}
    spans: list[IndexSpan] = []
    running: list[UsableFile] = []
    ordered = sorted(edges)
    for first, following in pairwise(ordered):
        running = [served for served in running if served.index_file.last >= first] + begins.get(first, [])
        if running:
            spans.append(_build_span(first, following - 1, running, prints.searched))
    return spans


def find_rollup_files(
    prints: FieldFingerprints,
    index_files: Iterable[IndexFile],
    plans: Mapping[str, PlanRecord],
    stream_id: str,
) -> list[UsableFile]:
    """Rollup files by their first entry, the longest first."""
    found = (
        prints.served(index_file, plans.get(index_file.plan_hash), stream_id)
        for index_file in index_files
        if index_file.family == AGG
    )
    served = [one for one in found if one is not None]
    return sorted(served, key=lambda one: (one.index_file.first, -one.index_file.last))


def _build_span(first: int, last: int, running: Sequence[UsableFile], wanted: Sequence[str]) -> IndexSpan:
    files: dict[str, list[UsableFile]] = {}
    primary: tuple[int, int] | None = None
    is_range = False
    # Files of the current plan come first, and among these the most merged ones.
    for served in sorted(running, key=lambda one: (not one.is_current, -one.index_file.level)):
        index_file = served.index_file
        files.setdefault(index_file.family, []).append(served)
        is_range = is_range or index_file.rows == index_file.last - index_file.first + 1
        least, most = index_file.stats.get("ts_min"), index_file.stats.get("ts_max")
        whole = index_file.family == COL and (index_file.first, index_file.last) == (first, last)
        if whole and served.is_current and isinstance(least, int) and isinstance(most, int):
            primary = (least, most)
    is_complete = all(any(one.is_current for one in files.get(family, ())) for family in wanted)
    return IndexSpan(first, last, is_range, files, primary, is_complete)


def order_by_time(spans: Sequence[IndexSpan]) -> list[IndexSpan]:
    """Spans by their primary timestamps; those without known bounds come last."""
    return sorted(spans, key=lambda span: (span.primary is None, span.primary or (0, 0)))


def query_clauses(query: BoundQuery) -> Iterable[Clause]:
    match query:
        case All(clauses) | AnyOf(clauses) | Anywhere(clauses):
            for clause in clauses:
                yield from query_clauses(clause)
        case Negation(clause):
            yield from query_clauses(clause)
        case _:
            yield query


class FileSelection:
    """Selects the files of a span that a query needs. `columns` are the fields to sort by."""

    def __init__(
        self,
        view: RecordView,
        query: BoundQuery,
        columns: Iterable[str],
        scored: Iterable[str],
        *,
        with_times: bool = True,
    ) -> None:
        self._view = view
        self._with_times = with_times  # whether the bounds of primary timestamps are needed
        self._query = query
        self._clauses = tuple(dict.fromkeys(query_clauses(query)))
        self._columns = tuple(columns)
        self._scored = tuple(scored)

    def files(self, span: IndexSpan, trimmed: int) -> dict[str, UsableFile] | None:
        """The files to open by key; None if the rows are better decoded.

        That is so if a sort column or a scored field has no file, or if no clause can be decided.
        """
        found: dict[str, UsableFile] = {}
        for name in self._columns:
            if not _add_file(found, span.serving(COL, name)):
                return None
        for name in self._scored:
            split = span.serving(FTS, name)
            if split is None or split.index_file.first <= trimmed:
                return None
            _add_file(found, split)
        primary = self._view.primary
        if self._with_times and primary is not None and (span.primary is None or span.first <= trimmed):
            if not _add_file(found, span.serving(COL, primary)):
                return None
        if not span.is_range and not _add_file(found, next(iter(span.files.get(COL, ())), None)):
            return None
        decides = False
        for clause in self._clauses:
            decides = _add_file(found, self._serving(clause, span)) or decides
        return found if decides else None

    def _serving(self, clause: Clause, span: IndexSpan) -> UsableFile | None:
        """The file that decides a clause best."""
        assert not isinstance(clause, Anywhere)
        exact, column = span.serving(EXACT, clause.field), span.serving(COL, clause.field)
        split = span.serving(FTS, clause.field)
        is_text = self._view.config.fields[clause.field].kind == "text"
        match clause:
            case Equals():
                return exact or column
            case HasValue():
                return column or exact or (split if is_text else None)
            case StartsWith():
                return column or exact or split
            case Compares():
                return column
            case Words() | Phrase():
                return split

    def rules_out(self, span: IndexSpan) -> bool:
        """Whether no row of a span can match, judged by its timestamps alone."""
        primary, bounds = self._view.primary, span.primary
        return primary is not None and bounds is not None and is_outside_times(self._query, primary, bounds)


def is_outside_times(query: BoundQuery, primary: str, bounds: tuple[int, int]) -> bool:
    """Whether no record whose `primary` timestamp lies within `bounds` can match."""

    def decide(clause: Clause) -> RowMatches | None:
        if not isinstance(clause, Compares | Equals) or clause.field != primary:
            return None
        comparison = clause.comparison if isinstance(clause, Compares) else "="
        return RowMatches(0, 0) if excludes_bounds(comparison, clause.value, bounds) else None

    return not match_rows(query, 1, decide).possible


def _add_file(found: dict[str, UsableFile], served: UsableFile | None) -> bool:
    if served is not None:
        found[served.published.key] = served
    return served is not None
