"""Changes that a query matches, chosen by the engine: no Python sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from tailrace.spark.live_queries.cells import variant_path
from tailrace.spark.live_queries.columns import FieldAccessor, lower_predicate
from tailrace.watch.cel import conjoin
from tailrace.watch.document import RESERVED_FIELDS
from tailrace.watch.evaluator import NotCompilableError
from tailrace.watch.query import read_query

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

ImageName = Literal["before", "after"]

_STAMPS: Final = {
    "before": {"version": ("prev", "version"), "updatedAt": ("prev", "updatedAt")},
    "after": {"version": ("version",)},
}
_SAME: Final = {"id": ("documentKey",), "collection": ("collection",), "createdAt": ("createdAt",)}


def document_image(entry: Column, updated_ms: Column, which: ImageName) -> FieldAccessor:
    """The flat document before or after a change, field by field; `entry` is the change as a variant."""
    from pyspark.sql import functions as f

    stamps = _SAME | _STAMPS[which]

    def field(name: str) -> Column:
        if name in stamps:
            there = f.try_variant_get(entry, variant_path(which), "variant")
            held = f.try_variant_get(entry, variant_path(*stamps[name]), "variant")
            return f.when(_is_there(there), held)
        if name == "updatedAt":
            there = f.try_variant_get(entry, variant_path(which), "variant")
            return f.when(_is_there(there), f.parse_json(updated_ms.cast("string")))
        if name.startswith("src_"):
            raise NotCompilableError  # it may be a field of the source, or one of this name
        if name in RESERVED_FIELDS or name.startswith("_"):
            return f.lit(None).cast("variant")
        return f.try_variant_get(entry, variant_path(which, name), "variant")

    def _is_there(image: Column) -> Column:
        return ~f.is_variant_null(image)

    return field


def matching(frame: DataFrame, query: dict[str, Any], which: ImageName = "after") -> DataFrame:
    """The changes in a frame whose document, before or after them, a query of subscriptions matches.

    Decided by the engine alone. NotLoweredError says that it cannot be; a change on which the query takes
    too many steps ends the job, since that is not the same as not matching.
    """
    from pyspark.sql import functions as f

    asked = read_query(query, live=True)
    entry = f.parse_json(f.col("value").cast("string"))
    updated_ms = f.call_function("div", f.col("timestamp_ns"), f.lit(1_000_000))
    image = document_image(entry, updated_ms, which)
    found = lower_predicate(conjoin([part.node for part in asked.parts]), image)
    failed = f.raise_error(f.lit("the query takes too many steps on a change")).cast("boolean")
    holds = f.when(found.undecided, failed).otherwise(found.holds)
    is_change = f.try_variant_get(entry, variant_path("kind"), "string") == "change"
    named = f.lit(True) if asked.documents is None else _is_one_of(image("id"), asked.documents)
    return frame.filter(is_change & named & holds)


def _is_one_of(document_id: Column, documents: frozenset[str]) -> Column:
    return document_id.try_cast("string").isin(sorted(documents))
