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
from typing import Any, NamedTuple, TypeVar

import msgspec

from tailrace.query import family_format as names
from tailrace.query.families.body import Body, InnerBody, turns
from tailrace.query.families.parquet_file import ParquetFile, array_in, check_facts
from tailrace.query.families.published import UnusableFileError
from tailrace.store.arrow import INT32, INT64, pa, pc
from tailrace.store.byte_window import ByteWindow

_FOUND_MAX = 64  # look-ups that are kept
_LISTS = (names.FIELD, names.TERM, names.ENTRIES, names.FREQUENCIES)
_KEPT_MAX = 16
_KEPT_ROW_BYTES = 24  # of what is kept, for each row, roughly
_OVERHEAD_BYTES = 4096
_TERMS_MAX = 4096  # that the text engine is asked for at once
_DIRECTORY_BYTES = 64 << 10  # the end of a split, with the list of its members
_HEADER_BYTES = 30  # of a member, before its name

T = TypeVar("T")


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
        self._found: OrderedDict[tuple[str, str], Postings] = OrderedDict()
        self._found_bytes = 0
        self._lengths: dict[str, Any] = {}
        self._kept: OrderedDict[tuple[object, ...], Any] = OrderedDict()
        self._lock = Lock()

    @property
    def memory_bytes(self) -> int:
        lengths = sum(found.nbytes for found in list(self._lengths.values()))
        kept = len(self._kept) * _KEPT_ROW_BYTES * (self.last - self.first + 1)
        rest = self._body.held_bytes - self._terms_held_bytes  # the table of terms counts as a file
        return self._terms.memory_bytes + rest + self._found_bytes + lengths + kept + _OVERHEAD_BYTES

    def kept(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """Something that was made of this file for one span; the next search may want it again."""
        found = self._kept.get(key)
        if found is None:
            found = make()
            with self._lock:
                self._kept[key] = found
                if len(self._kept) > _KEPT_MAX:
                    self._kept.popitem(last=False)
        return found

    # -- tokens --------------------------------------------------------------------------------------------

    def postings(self, field: str, token: str) -> Postings:
        key = (field, token)
        found = self._found.get(key)
        if found is None:
            found = self._looked_up(field, token)
            with self._lock:
                self._found[key] = found
                self._found_bytes += found.entries.nbytes + found.frequencies.nbytes
                if len(self._found) > _FOUND_MAX:
                    _, old = self._found.popitem(last=False)
                    self._found_bytes -= old.entries.nbytes + old.frequencies.nbytes
        return found

    def documents_with(self, field: str, token: str) -> int:
        return len(self.postings(field, token).entries)

    def _looked_up(self, field: str, token: str) -> Postings:
        return self._postings_where(field, lambda terms: pc.equal(terms, token), (token, token))

    def _postings_where(
        self, field: str, marked: Callable[[Any], Any], terms: tuple[str, str] | None
    ) -> Postings:
        """The rows of the table that some mark on their terms chooses; a null stands for the whole field."""
        entries: list[Any] = []
        frequencies: list[Any] = []
        for table in self._terms.tables(self._groups(field, terms), _LISTS):
            marks = pc.and_(
                marked(array_in(table, names.TERM)), pc.equal(array_in(table, names.FIELD), field)
            )
            entries.append(array_in(table, names.ENTRIES).filter(marks).flatten())
            frequencies.append(array_in(table, names.FREQUENCIES).filter(marks).flatten())
        if not entries:
            return Postings(pa.array([], INT64), pa.array([], INT32))
        return Postings(pa.concat_arrays(entries), pa.concat_arrays(frequencies))

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
        """The entries with a token that starts like this, in no order, some more than once."""
        bounds = (prefix, prefix + "\U0010ffff")
        return self._postings_where(field, lambda terms: pc.starts_with(terms, prefix), bounds).entries

    def lengths(self, field: str) -> Any:
        """The tokens of a text, for each number from the first to the last of the file; null: no text."""
        found = self._lengths.get(field)
        if found is None:
            texts = self._postings_where(field, lambda terms: terms.is_null(), None)
            numbers = pa.array(range(self.first, self.last + 1), INT64)
            found = texts.frequencies.take(pc.index_in(numbers, value_set=texts.entries))
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

    def phrase(self, field: str, tokens: Sequence[str]) -> list[int] | None:
        """The entries with these tokens one after the other; None if that cannot be told here."""
        with self._lock:
            engine = self._engine
        if engine is None or not self.texts[field].positions:
            return None
        return engine.phrase(field, tokens)

    def keyword_prefix(self, field: str, prefix: str) -> list[int] | None:
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

    def phrase(self, field: str, tokens: Sequence[str]) -> list[int]:
        queries = self._library.Query
        if len(tokens) == 1:
            return self._entries(queries.term_query(self._schema, field, tokens[0]))
        return self._entries(queries.phrase_query(self._schema, field, list(tokens)))

    def keyword_prefix(self, field: str, prefix: str) -> list[int] | None:
        terms_with_prefix = getattr(self._searcher, "terms_with_prefix", None)
        if terms_with_prefix is None:
            return None  # an older version of the library
        found = terms_with_prefix(field, prefix, limit=_TERMS_MAX + 1)
        if len(found) > _TERMS_MAX:
            return None
        terms = [term for term, _ in found]
        return self._entries(self._library.Query.term_set_query(self._schema, field, terms)) if terms else []

    def _entries(self, query: Any) -> list[int]:
        limit = max(self._searcher.num_docs, 1)
        scored = self._library.Query.const_score_query(query, 1.0)
        hits = self._searcher.search(scored, limit=limit, count=False).hits
        return sorted(self._searcher.fast_field_values(names.ENTRY, [address for _, address in hits]))
