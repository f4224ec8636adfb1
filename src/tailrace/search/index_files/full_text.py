"""The `fts` index file: postings, positions and text lengths, and BM25 scores computed from them.

The file, called a split, is a zip archive with a table of terms. Scores are summed in the order of the
clauses, as in all other sources.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from threading import Lock
from typing import Any, NamedTuple, Protocol

import msgspec

from tailrace.common.caches import LruCache
from tailrace.search.columns import rows_from_bits
from tailrace.search.index_files import format as names
from tailrace.search.index_files.file_cache import (
    EmbeddedContent,
    FileContent,
    UnusableFileError,
    split_by_size,
)
from tailrace.search.index_files.parquet_file import ParquetFile, check_metadata, column_array
from tailrace.search.numpy_arrays import EMPTY, bits_from_row_array, narrow_integers, np, to_numpy
from tailrace.search.query_language import All, AnyOf, Anywhere, BoundQuery, Clause, Negation, Phrase, Words
from tailrace.search.ranking import ScoredClause, Scorer, has_text_clause
from tailrace.storage.segments.parquet import PartialFile, pc

_FOUND_MAX = 64  # cached lookups
_TERMS = (names.FIELD, names.TERM)
_LISTS = (names.ENTRIES, names.FREQUENCIES)
_PLACED_LISTS = (*_LISTS, names.POSITIONS)
_OVERHEAD_BYTES = 4096
_PLACE_BITS = np.int64(32)
_DIRECTORY_BYTES = 64 << 10  # the end of a split, with its zip directory
_HEADER_BYTES = 30  # of a member, before its name


class TextStatistics(msgspec.Struct):
    """Statistics of one text field in `split.json`."""

    field: str
    documents: int
    tokens: int
    positions: bool


class Postings(NamedTuple):
    """The entries with a token, ascending, and its frequency in each."""

    entries: Any
    frequencies: Any


class PackedPostings(NamedTuple):
    """Postings in fewer bytes, for the cache: entries are relative to the first of the file."""

    entries: Any
    frequencies: Any

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes + self.frequencies.nbytes


NO_POSTINGS = Postings(EMPTY, EMPTY)


class SplitArchive:
    """The members of a split, which are not compressed. Only the directory is read at first."""

    def __init__(self, body: FileContent) -> None:
        self._body = body
        directory = zipfile.ZipFile(self._window([(max(body.size - _DIRECTORY_BYTES, 0), body.size)]))
        self.members = {member.filename: member for member in directory.infolist()}

    def _window(self, ranges: Sequence[tuple[int, int]]) -> Any:
        return PartialFile(self._body.size, self._body.stretches(ranges))

    def _place(self, member: zipfile.ZipInfo) -> tuple[int, int]:
        """The byte range of a member, behind its header, name and extra field."""
        if member.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile(f"{member.filename} is compressed")
        start = member.header_offset + _HEADER_BYTES + len(member.orig_filename.encode()) + len(member.extra)
        return start, start + member.file_size

    def read(self, wanted: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Read members and verify their checksums."""
        found = [self.members[name] for name in wanted]
        for batch in split_by_size([member.file_size for member in found]):
            window = self._window([self._place(found[place]) for place in batch])
            for member in (found[place] for place in batch):
                window.seek(self._place(member)[0])
                data = window.read(member.file_size)
                if zlib.crc32(data) != member.CRC:
                    raise zipfile.BadZipFile(f"checksum of {member.filename} does not match")
                yield member.filename, data

    def inner(self, name: str) -> EmbeddedContent:
        """A member as a file."""
        start, stop = self._place(self.members[name])
        return EmbeddedContent(self._body, start, stop - start)


class FullTextFile:
    def __init__(self, body: FileContent, stream_id: str, first: int, last: int) -> None:
        self._body = body
        try:
            self._split = SplitArchive(body)
            [(_, described)] = self._split.read([names.SPLIT_FACTS])
            split = msgspec.json.decode(described, type=dict[str, Any])
            facts = {names.FACT_PREFIX + key: str(value) for key, value in split.items()}
            texts = msgspec.convert(split["text"], list[TextStatistics])
            self.keywords = frozenset(msgspec.convert(split["keyword"], list[str]))
            terms = self._split.inner(names.SPLIT_TERMS)
        except (zipfile.BadZipFile, KeyError, msgspec.MsgspecError, OSError) as error:
            raise UnusableFileError(f"not a valid fts file: {error}") from error
        check_metadata(facts, names.FTS, stream_id, first, last)
        self.texts = {text.field: text for text in texts}
        self.first, self.last = first, last
        self._terms = ParquetFile(terms)
        self._terms_held_bytes = terms.held_bytes
        self._found: LruCache[tuple[str, ...], PackedPostings] = LruCache(
            entries_max=_FOUND_MAX, size_of=lambda _, found: found.nbytes
        )
        self._lengths: dict[str, Any] = {}
        self._lock = Lock()

    @property
    def memory_bytes(self) -> int:
        lengths = sum(found.nbytes for found in list(self._lengths.values()))
        rest = self._body.held_bytes - self._terms_held_bytes  # the table of terms counts as a file
        return self._terms.memory_bytes + rest + self._found.size + lengths + _OVERHEAD_BYTES

    # -- tokens --------------------------------------------------------------------------------------------

    def postings(self, field: str, token: str) -> Postings:
        found = self._packed(field, token)
        return Postings(self._unpacked(found), found.frequencies)

    def _packed(self, field: str, token: str) -> PackedPostings:
        return self._cached_lookup(("token", field, token), lambda: self._look_up_token(field, token))

    def _unpacked(self, found: PackedPostings) -> Any:
        return found.entries + np.int64(self.first)

    def _cached_lookup(self, key: tuple[str, ...], look_up: Callable[[], Postings]) -> PackedPostings:
        """The last lookups are cached: a split may cover many spans, each of which needs them."""
        found = self._found.peek(key)
        if found is None:
            looked_up = look_up()
            found = PackedPostings(
                narrow_integers(looked_up.entries - self.first), narrow_integers(looked_up.frequencies)
            )
            with self._lock:
                self._found.put(key, found)
        return found

    def documents_with(self, field: str, token: str) -> int:
        return len(self._packed(field, token).entries)

    def _look_up_token(self, field: str, token: str) -> Postings:
        return self._postings_where(field, lambda terms: pc.equal(terms, token), (token, token))

    def _postings_where(
        self, field: str, marked: Callable[[Any], Any], terms: tuple[str, str] | None
    ) -> Postings:
        """The postings of terms for which `marked` is true; the null term stands for the whole field."""
        entries: list[Any] = []
        frequencies: list[Any] = []
        for table, marks in self._matching_groups(field, marked, terms):
            entries.append(to_numpy(column_array(table, names.ENTRIES).filter(marks).flatten()))
            frequencies.append(to_numpy(column_array(table, names.FREQUENCIES).filter(marks).flatten()))
        return Postings(np.concatenate(entries), np.concatenate(frequencies)) if entries else NO_POSTINGS

    def _matching_groups(
        self,
        field: str,
        marked: Callable[[Any], Any],
        terms: tuple[str, str] | None,
        lists: Sequence[str] = _LISTS,
    ) -> Iterator[tuple[Any, Any]]:
        """Row groups with a marked term: the table of their lists, and the marks."""
        groups = self._groups(field, terms)
        marks: dict[int, Any] = {}
        for group, table in zip(groups, self._terms.tables(groups, _TERMS), strict=True):
            found = pc.and_(
                marked(column_array(table, names.TERM)), pc.equal(column_array(table, names.FIELD), field)
            )
            if pc.any(found).as_py():
                marks[group] = found
        # Not cached: the lists of all terms are large, and the lookups are cached themselves.
        yield from zip(self._terms.read_tables(list(marks), lists), marks.values(), strict=True)

    def _groups(self, field: str, bounds: tuple[str, str] | None) -> list[int]:
        """Row groups that may have a term of a field within bounds; without bounds, the null term."""
        found: list[int] = []
        for group in range(self._terms.groups):
            fields = self._terms.statistics(group, names.FIELD)
            if fields is not None and not fields[0] <= field <= fields[1]:
                continue
            terms = self._terms.statistics(group, names.TERM)
            mixed = fields is None or fields[0] != fields[1]
            if bounds is None:
                if self._terms.has_nulls(group, names.TERM):
                    found.append(group)
            elif terms is None or mixed or (terms[0] <= bounds[1] and terms[1] >= bounds[0]):
                found.append(group)
        return found

    def starting_with(self, field: str, prefix: str) -> Any:
        """The entries with a token that starts with a prefix, ascending."""
        bounds = (prefix, prefix + "\U0010ffff")

        def look_up() -> Postings:
            found = self._postings_where(field, lambda terms: pc.starts_with(terms, prefix), bounds)
            return Postings(np.unique(found.entries), EMPTY)

        return self._unpacked(self._cached_lookup(("start", field, prefix), look_up))

    def lengths(self, field: str) -> Any:
        """The length in tokens for each number from the first to the last entry; 0 without a text."""
        found = self._lengths.get(field)
        if found is None:
            texts = self._postings_where(field, lambda terms: terms.is_null(), None)
            lengths = narrow_integers(texts.frequencies)
            found = np.zeros(self.last - self.first + 1, lengths.dtype)
            found[texts.entries - self.first] = lengths
            self._lengths[field] = found
        return found

    def entries_with_text(self, field: str) -> Any:
        """The entries with a text, even one without tokens."""
        return self._postings_where(field, lambda terms: terms.is_null(), None).entries

    # -- phrases and keywords ------------------------------------------------------------------------------

    def phrase(self, field: str, tokens: Sequence[str]) -> Any:
        """The entries with tokens in sequence; None if the file has no positions."""
        if not self.texts[field].positions:
            return None
        key = ("phrase", field, *tokens)
        return self._unpacked(
            self._cached_lookup(key, lambda: Postings(self._find_phrase(field, tokens), EMPTY))
        )

    def _find_phrase(self, field: str, tokens: Sequence[str]) -> Any:
        """Intersect the positions where each token puts the start of the phrase, rarest token first."""
        begins = {token: self._token_positions(field, token) for token in set(tokens)}
        by_frequency = sorted(enumerate(tokens), key=lambda item: len(begins[item[1]]))
        [(at, token), *others] = by_frequency
        found = begins[token] - at
        for at, token in others:
            places = begins[token]
            if not len(found) or not len(places):
                return EMPTY
            expected = found + at
            near = np.minimum(np.searchsorted(places, expected), len(places) - 1)
            found = found[places[near] == expected]
        return np.unique(found >> _PLACE_BITS) + self.first

    def _token_positions(self, field: str, token: str) -> Any:
        """All positions of a token, ascending: entry in the upper bits, position in the lower."""
        found: list[Any] = []
        for table, marks in self._matching_groups(
            field, lambda terms: pc.equal(terms, token), (token, token), _PLACED_LISTS
        ):
            entries, frequencies, places = (
                to_numpy(column_array(table, name).filter(marks).flatten()) for name in _PLACED_LISTS
            )
            found.append((np.repeat(entries - self.first, frequencies) << _PLACE_BITS) + places)
        return np.concatenate(found) if found else EMPTY

    def keyword_prefix(self, field: str, prefix: str) -> Any:
        """The entries with a keyword that starts with a prefix; None if the file cannot decide it."""
        if field not in self.keywords or len(prefix.encode()) > names.KEYWORD_BYTES_MAX - 4:
            return None
        return self.starting_with(field, prefix)


SCORE_TABLE_MAX = 1 << 16  # up to this number a table finds distinct values; beyond, sorting does


class TokenPostings:
    """The rows with one token, ascending, with its frequency and the length of the text."""

    def __init__(self, rows: Any, frequencies: Any, lengths: Any) -> None:
        self.rows = rows
        self.frequencies = frequencies
        self.lengths = lengths

    def frequencies_in(self, rows: Any) -> Any:
        """The frequency of the token in each of some rows."""
        if not len(self.rows):
            return np.zeros(len(rows), np.int64)
        places = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        return np.where(self.rows[places] == rows, self.frequencies[places], 0)

    def rows_with_one(self, count: int) -> int:
        """The set of rows that have the token once."""
        return bits_from_row_array(self.rows[self.frequencies == 1], count)

    @cached_property
    def _kinds(self) -> tuple[list[tuple[int, int]], Any]:
        """The distinct pairs of frequency and length, and the index of each row's pair."""
        width = int(self.lengths.max()) + 1
        listed, places = _distinct_numbers(self.frequencies.astype(np.int64) * width + self.lengths)
        return [divmod(kind, width) for kind in listed.tolist()], places

    def rows_scoring_at_least(self, score: Callable[[int, int], float], least: float, count: int) -> int:
        """The set of rows whose frequency and length score at least `least`."""
        if not len(self.rows):
            return 0
        kinds, places = self._kinds
        enough = np.array([score(*kind) >= least for kind in kinds])
        return bits_from_row_array(self.rows[enough[places]], count)


def _distinct_numbers(numbers: Any) -> tuple[Any, Any]:
    """The distinct numbers, and the index of each number among them."""
    largest = int(numbers.max())
    if largest >= SCORE_TABLE_MAX:
        return np.unique(numbers, return_inverse=True)
    listed = np.flatnonzero(np.bincount(numbers))
    table = np.zeros(largest + 1, np.intp)
    table[listed] = np.arange(len(listed))
    return listed, table[numbers]


class PostingsSource(Protocol):
    """A source with matching rows, token postings and text lengths."""

    @property
    def count(self) -> int:
        """The number of rows."""
        ...

    def certain_rows(self, clause: Clause) -> int: ...
    def token_rows(self, field: str, token: str) -> TokenPostings: ...
    def text_lengths(self, field: str) -> Any:
        """The length of the text of each row in tokens."""
        ...


def can_score_from_postings(query: BoundQuery) -> bool:
    """Whether postings are enough to score most rows."""
    match query:
        case All(clauses) | AnyOf(clauses) | Anywhere(clauses):
            return all(can_score_from_postings(clause) for clause in clauses)
        case Phrase():
            return len(set(query.tokens)) == len(query.tokens)
        case _:
            return True


def rows_needing_records(source: PostingsSource, query: BoundQuery) -> int:
    """The rows in which a phrase may occur more than once: its frequency has to be read from the record.

    Where one of its tokens occurs once, so does the phrase.
    """
    match query:
        case All(clauses) | AnyOf(clauses) | Anywhere(clauses):
            found = 0
            for clause in clauses:
                found |= rows_needing_records(source, clause)
            return found
        case Phrase(field, tokens) if len(tokens) > 1:
            found = source.certain_rows(query)
            for token in tokens:
                found &= ~source.token_rows(field, token).rows_with_one(source.count) if found else 0
            return found
        case _:
            return 0


def score_rows(source: PostingsSource, query: BoundQuery, rows: int, scorer: Scorer) -> dict[int, float]:
    scores = dict.fromkeys(rows_from_bits(rows), 0.0)
    _add_scores(source, query, rows, scorer, scores)
    return scores


def _add_scores(
    source: PostingsSource, query: BoundQuery, rows: int, scorer: Scorer, scores: dict[int, float]
) -> None:
    match query:
        case All(clauses):
            for clause in clauses:
                _add_scores(source, clause, rows, scorer, scores)
        case AnyOf(clauses):
            for clause in clauses:
                if has_text_clause(clause) and (matching := rows & certain_rows(source, clause)):
                    _add_scores(source, clause, matching, scorer, scores)
        case Anywhere(targets):
            best: dict[int, float] = {}
            for target in targets:
                weights = _clause_scores(source, target, rows & source.certain_rows(target), scorer)
                for row, weight in weights.items():
                    if weight > best.get(row, 0.0):
                        best[row] = weight
            for row, weight in best.items():
                scores[row] += weight
        case Words() | Phrase():
            for row, weight in _clause_scores(source, query, rows, scorer).items():
                scores[row] += weight
        case _:
            return


def certain_rows(source: PostingsSource, query: BoundQuery) -> int:
    """The rows that match a part of a query whose clauses are all certain."""
    match query:
        case All(clauses):
            found = -1
            for clause in clauses:
                found &= certain_rows(source, clause)
            return found
        case AnyOf(clauses) | Anywhere(clauses):
            found = 0
            for clause in clauses:
                found |= certain_rows(source, clause)
            return found
        case Negation(clause):
            return ~certain_rows(source, clause)
        case _:
            return source.certain_rows(query)


def _clause_scores(
    source: PostingsSource, clause: ScoredClause, rows: int, scorer: Scorer
) -> dict[int, float]:
    """The scores of one clause in rows that match it."""
    if not rows:
        return {}
    if not isinstance(clause, Words | Phrase) or (isinstance(clause, Words) and clause.prefix):
        return dict.fromkeys(rows_from_bits(rows), scorer.boost(clause.field))
    listed = rows_from_bits(rows)
    places = np.array(listed)
    often = np.stack(
        [source.token_rows(clause.field, token).frequencies_in(places) for token in clause.tokens]
    )
    if isinstance(clause, Phrase):
        often = often.min(axis=0, keepdims=True)
    frequencies: list[list[int]] = often.T.tolist()
    lengths: list[int] = source.text_lengths(clause.field)[places].tolist()
    weights: dict[int, float] = {}
    known: dict[tuple[tuple[int, ...], int], float] = {}  # many rows share few combinations
    for row, found, length in zip(listed, frequencies, lengths, strict=True):
        key = (tuple(found), length)
        weight = known.get(key)
        if weight is None:
            weight = known[key] = scorer.score_clause(clause, *key)
        weights[row] = weight
    return weights


def rows_scoring_at_least(
    source: PostingsSource, query: BoundQuery, rows: int, scorer: Scorer, least: float
) -> int:
    """The matching rows that may score at least `least`: a superset of those that do."""
    match query:
        case All(clauses):
            scored = [clause for clause in clauses if has_text_clause(clause)]
            return rows_scoring_at_least(source, scored[0], rows, scorer, least) if len(scored) == 1 else rows
        case Anywhere(targets):
            candidates = 0
            for target in targets:
                candidates |= _clause_rows_scoring_at_least(
                    source, target, rows & source.certain_rows(target), scorer, least
                )
            return candidates
        case Words() | Phrase():
            return _clause_rows_scoring_at_least(source, query, rows, scorer, least)
        case _:
            return rows


def _clause_rows_scoring_at_least(
    source: PostingsSource, clause: ScoredClause, rows: int, scorer: Scorer, least: float
) -> int:
    """The rows matching one clause that may score at least `least`."""
    if not rows:
        return 0
    if not isinstance(clause, Words | Phrase) or (isinstance(clause, Words) and clause.prefix):
        return rows if scorer.boost(clause.field) >= least else 0
    [token, *others] = clause.tokens
    is_phrase = isinstance(clause, Phrase) and bool(others)
    if others and not is_phrase:
        return rows

    def score(frequency: int, length: int) -> float:
        # A phrase scored here occurs once, however often its tokens do.
        return scorer.score_clause(clause, (1 if is_phrase else frequency,), length)

    return source.token_rows(clause.field, token).rows_scoring_at_least(score, least, source.count) & rows
