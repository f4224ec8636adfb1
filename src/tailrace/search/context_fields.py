"""Fields of events that are not declared: what the `evlog` profile moves to `context`, by its path.

`context.user:u7` asks for the text at `/context/user`. The name becomes a field of this one query. No index
has it: indexes tell by the other clauses which rows may match, and the records of those are decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.schema.body import shorten
from tailrace.schema.search_fields import Binding, Field, Kind
from tailrace.search.dialect import SEARCH_DIALECT, Dialect
from tailrace.search.parser import And, FieldComparison, Not, Or, QueryNode, parse_query_text
from tailrace.search.values import converter_for
from tailrace.search.view import RecordView

CONTEXT_PREFIX: Final = "context."
CONTEXT_PROFILE: Final = "evlog"
_KINDS: Final[tuple[Kind, ...]] = ("float", "bool")
_VIEWS_CACHED_MAX: Final = 64


def add_context_fields(view: RecordView, text: str, dialect: Dialect = SEARCH_DIALECT) -> RecordView:
    """The view that has the fields of `context` which a query asks for; the same one if there are none."""
    if view.config.profile != CONTEXT_PROFILE or CONTEXT_PREFIX not in text:
        return view
    try:
        tree = parse_query_text(text, dialect)
    except TailraceError:
        return view  # refused when it is bound, in the usual order
    kinds: dict[str, Kind] = {}
    for clause in _field_comparisons(tree):
        if not clause.name.startswith(CONTEXT_PREFIX) or view.config.resolve(clause.name) is not None:
            continue
        kind = _infer_kind(clause)
        if kinds.setdefault(clause.name, kind) != kind:
            raise dialect.refuse(
                f"{dialect.field} {shorten(clause.name)} is asked for by values of two kinds; quote a number "
                "that is meant as text"
            )
    return _extend_view(view, tuple(sorted(kinds.items()))) if kinds else view


def _field_comparisons(tree: QueryNode) -> Iterator[FieldComparison]:
    match tree:
        case And(children) | Or(children):
            for child in children:
                yield from _field_comparisons(child)
        case Not(child):
            yield from _field_comparisons(child)
        case FieldComparison():
            yield tree
        case _:
            pass


def _infer_kind(clause: FieldComparison) -> Kind:
    """A number or a truth if it is written as one, else text."""
    if clause.value.quoted:
        return "keyword"
    for kind in _KINDS:
        if converter_for(Field(kind, ()))(clause.value.text) is not None:
            return kind
    return "keyword"


@lru_cache(_VIEWS_CACHED_MAX)
def _extend_view(view: RecordView, kinds: tuple[tuple[str, Kind], ...]) -> RecordView:
    fields = dict(view.config.fields)
    for name, kind in kinds:
        pointer = "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in name.split("."))
        bindings = (Binding(1, pointer),)
        fields[name] = (
            Field(kind, bindings, exact=True, prefix=True)
            if kind == "keyword"
            else Field(kind, bindings, exact=True, column=True)
        )
    search = msgspec.structs.replace(view.config, fields=fields)
    extended = RecordView(msgspec.structs.replace(view.registry, search=search))
    extended.indexed = view
    return extended
