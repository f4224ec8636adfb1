"""`fts`: which entries have a token, how often, and how long their texts are.

All of that is in the table of terms. The text engine is only asked for phrases, and for the starts of
keywords; where it is not installed, rows are decoded instead.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import msgspec

from tailrace.query import family_format as names
from tailrace.query.families.body import Body, InnerBody, turns
from tailrace.query.families.numbers import NONE, np, numbers_in
from tailrace.query.families.parquet_file import ParquetFile, array_in, check_facts
from tailrace.query.families.published import UnusableFileError
from tailrace.store.arrow import pc
from tailrace.store.byte_window import ByteWindow

_FOUND_MAX = 64  # look-ups that are kept
_TERMS = (names.FIELD, names.TERM)
_LISTS = (names.ENTRIES, names.FREQUENCIES)
_OVERHEAD_BYTES = 4096
_TERMS_MAX = 4096  # that the text engine is asked for at once
_DIRECTORY_BYTES = 64 << 10  # the end of a split, with the list of its members
_HEADER_BYTES = 30  # of a member, before its name


class TextFacts(msgspec.Struct):
    """What `split.json` says of one text field."""

    field: str
    length: str
    documents: int
    tokens: int
    positions: bool


class Postings(NamedTuple):
    """The entries with a token, ascending, and how often each has it."""

    entries: Any
    frequencies: Any

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes + self.frequencies.nbytes


NOWHERE = Postings(NONE, NONE)


class Split:
    """The members of a split, stored as they are. Their names and places are known; the rest is fetched."""

    def __init__(self, body: Body) -> None:
        self._body = body
        directory = zipfile.ZipFile(self._window([(max(body.size - _DIRECTORY_BYTES, 0), body.size)]))
        self.members = {member.filename: member for member in directory.infolist()}

    def _window(self, ranges: Sequence[tuple[int, int]]) -> Any:
        return ByteWindow(self._body.size, self._body.stretches(ranges))

    def _place(self, member: zipfile.ZipInfo) -> tuple[int, int]:
        """Where the bytes of a member are: behind its header, its name and what else is said of it."""
        if member.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile(f"{member.filename} is not stored as it is")
        start = member.header_offset + _HEADER_BYTES + len(member.orig_filename.encode()) + len(member.extra)
        return start, start + member.file_size

    def read(self, wanted: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Some members, compared with their checksums."""
        found = [self.members[name] for name in wanted]
        for turn in turns([member.file_size for member in found]):
            window = self._window([self._place(found[place]) for place in turn])
            for member in (found[place] for place in turn):
                window.seek(self._place(member)[0])
                data = window.read(member.file_size)
                if zlib.crc32(data) != member.CRC:
                    raise zipfile.BadZipFile(f"{member.filename} does not have its checksum")
                yield member.filename, data

    def inner(self, name: str) -> InnerBody:
        """A member as a file of its own."""
        start, stop = self._place(self.members[name])
        return InnerBody(self._body, start, stop - start)


class FtsFile:
    def __init__(self, body: Body, stream_id: str, first: int, last: int) -> None:
        self._body = body
        try:
            self._split = Split(body)
            [(_, described)] = self._split.read([names.SPLIT_FACTS])
            split = msgspec.json.decode(described, type=dict[str, Any])
            facts = {names.FACT_PREFIX + key: str(value) for key, value in split.items()}
            texts = msgspec.convert(split["text"], list[TextFacts])
            self.keywords = frozenset(msgspec.convert(split["keyword"], list[str]))
            terms = self._split.inner(names.SPLIT_TERMS)
        except (zipfile.BadZipFile, KeyError, msgspec.MsgspecError, OSError) as error:
            raise UnusableFileError(f"it is no split: {error}") from error
        check_facts(facts, names.FTS, stream_id, first, last)
        self.texts = {text.field: text for text in texts}
        self.first, self.last = first, last
        self._terms = ParquetFile(terms)
        self._terms_held_bytes = terms.held_bytes
        self._found: OrderedDict[tuple[str, ...], Postings] = OrderedDict()
        self._found_bytes = 0
        self._lengths: dict[str, Any] = {}
        self._lock = Lock()

    @property
    def memory_bytes(self) -> int:
        lengths = sum(found.nbytes for found in list(self._lengths.values()))
        rest = self._body.held_bytes - self._terms_held_bytes  # the table of terms counts as a file
        return self._terms.memory_bytes + rest + self._found_bytes + lengths + _OVERHEAD_BYTES

    # -- tokens --------------------------------------------------------------------------------------------

    def postings(self, field: str, token: str) -> Postings:
        return self._kept(("token", field, token), lambda: self._looked_up(field, token))

    def _kept(self, key: tuple[str, ...], look_up: Callable[[], Postings]) -> Postings:
        """What was looked up last stays: a split may speak for many spans, and each of them asks."""
        found = self._found.get(key)
        if found is None:
            found = look_up()
            with self._lock:
                self._found[key] = found
                self._found_bytes += found.nbytes
                if len(self._found) > _FOUND_MAX:
                    self._found_bytes -= self._found.popitem(last=False)[1].nbytes
        return found

    def documents_with(self, field: str, token: str) -> int:
        return len(self.postings(field, token).entries)

    def _looked_up(self, field: str, token: str) -> Postings:
        return self._postings_where(field, lambda terms: pc.equal(terms, token), (token, token))

    def _postings_where(
        self, field: str, marked: Callable[[Any], Any], terms: tuple[str, str] | None
    ) -> Postings:
        """The rows of the table that some mark on their terms chooses; a null stands for the whole field."""
        groups = self._groups(field, terms)
        marks: dict[int, Any] = {}
        for group, table in zip(groups, self._terms.tables(groups, _TERMS), strict=True):
            found = pc.and_(
                marked(array_in(table, names.TERM)), pc.equal(array_in(table, names.FIELD), field)
            )
            if pc.any(found).as_py():
                marks[group] = found
        entries: list[Any] = []
        frequencies: list[Any] = []
        # Not kept: the lists of all terms are large, and those that are wanted stay by themselves.
        for group, table in zip(marks, self._terms.read_tables(list(marks), _LISTS), strict=True):
            entries.append(numbers_in(array_in(table, names.ENTRIES).filter(marks[group]).flatten()))
            frequencies.append(numbers_in(array_in(table, names.FREQUENCIES).filter(marks[group]).flatten()))
        return Postings(np.concatenate(entries), np.concatenate(frequencies)) if entries else NOWHERE

    def _groups(self, field: str, wanted: tuple[str, str] | None) -> list[int]:
        """Row groups that may have a term of a field in these bounds; without bounds, the field's own row."""
        found: list[int] = []
        for group in range(self._terms.groups):
            fields = self._terms.statistics(group, names.FIELD)
            if fields is not None and not fields[0] <= field <= fields[1]:
                continue
            terms = self._terms.statistics(group, names.TERM)
            mixed = fields is None or fields[0] != fields[1]
            if wanted is None:
                if self._terms.has_nulls(group, names.TERM):
                    found.append(group)
            elif terms is None or mixed or (terms[0] <= wanted[1] and terms[1] >= wanted[0]):
                found.append(group)
        return found

    def starting_with(self, field: str, prefix: str) -> Any:
        """The entries with a token that starts like this, ascending."""
        bounds = (prefix, prefix + "\U0010ffff")

        def look_up() -> Postings:
            found = self._postings_where(field, lambda terms: pc.starts_with(terms, prefix), bounds)
            return Postings(np.unique(found.entries), NONE)

        return self._kept(("start", field, prefix), look_up).entries

    def lengths(self, field: str) -> Any:
        """The tokens of a text, for each number from the first to the last of the file; 0 without a text."""
        found = self._lengths.get(field)
        if found is None:
            texts = self._postings_where(field, lambda terms: terms.is_null(), None)
            found = np.zeros(self.last - self.first + 1, np.int32)
            found[texts.entries - self.first] = texts.frequencies
            self._lengths[field] = found
        return found

    def with_text(self, field: str) -> Any:
        """The entries that have a text, be there a token in it or not."""
        return self._postings_where(field, lambda terms: terms.is_null(), None).entries

    # -- the text engine -----------------------------------------------------------------------------------

    @cached_property
    def _engine(self) -> _Engine | None:
        try:
            return _Engine(self._split, import_module("tantivy"))
        except (ImportError, ValueError, OSError, zipfile.BadZipFile):
            return None

    def phrase(self, field: str, tokens: Sequence[str]) -> Any:
        """The entries with these tokens one after the other; None if that cannot be told here."""
        with self._lock:
            engine = self._engine
        if engine is None or not self.texts[field].positions:
            return None
        key = ("phrase", field, *tokens)
        return self._kept(key, lambda: Postings(engine.phrase(field, tokens), NONE)).entries

    def keyword_prefix(self, field: str, prefix: str) -> Any:
        """The entries with a keyword that starts like this; None if that cannot be told here."""
        if field not in self.keywords or len(prefix.encode()) > names.KEYWORD_BYTES_MAX - 4:
            return None
        with self._lock:
            engine = self._engine
        return None if engine is None else engine.keyword_prefix(field, prefix)


class _Engine:
    """The index of a split, unpacked where the library can map it."""

    def __init__(self, split: Split, library: Any) -> None:
        folder = Path(tempfile.mkdtemp(prefix="tailrace-split-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._library = library
        members = [name for name in split.members if name.startswith(names.SPLIT_INDEX)]
        for name, data in split.read(members):
            (folder / Path(name).name).write_bytes(data)
        index = library.Index.open(str(folder))
        self._schema = index.schema
        self._searcher = index.searcher()

    def phrase(self, field: str, tokens: Sequence[str]) -> Any:
        queries = self._library.Query
        if len(tokens) == 1:
            return self._entries(queries.term_query(self._schema, field, tokens[0]))
        return self._entries(queries.phrase_query(self._schema, field, list(tokens)))

    def keyword_prefix(self, field: str, prefix: str) -> Any:
        terms_with_prefix = getattr(self._searcher, "terms_with_prefix", None)
        if terms_with_prefix is None:
            return None  # an older version of the library
        found = terms_with_prefix(field, prefix, limit=_TERMS_MAX + 1)
        if len(found) > _TERMS_MAX:
            return None
        terms = [term for term, _ in found]
        return (
            self._entries(self._library.Query.term_set_query(self._schema, field, terms)) if terms else NONE
        )

    def _entries(self, query: Any) -> Any:
        limit = max(self._searcher.num_docs, 1)
        scored = self._library.Query.const_score_query(query, 1.0)
        hits = self._searcher.search(scored, limit=limit, count=False).hits
        found = self._searcher.fast_field_values(names.ENTRY, [address for _, address in hits])
        return np.sort(np.array(found, np.int64))
