"""The index plan of a stream: which index families to build, and everything that determines their bytes.

A pure function of the stream's documents. The hash covers all that can change an index file and nothing else,
so two plans with the same hash build the same files. Each field, rollup and family also has a fingerprint of
its own: an index file of an older plan remains usable for what did not change.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Final, cast

import msgspec

from tailrace.schema.json_values import parse_pointer
from tailrace.schema.lenses import LensOp, parse_lens
from tailrace.schema.registry import Registry, read_registry
from tailrace.schema.search_config import Field, Measure, Rollup, SearchConfig
from tailrace.search.index_files.format import FORMATS, PARTIAL_ROLLUP_VERSION
from tailrace.search.query_language import All, AnyOf, Anywhere, BoundQuery, Negation, bind_rollup_include
from tailrace.search.records import RecordView

FAMILIES: Final = ("routing_key_index", "routing_key_lexicon", "exact", "col", "fts", "agg", "mblk")
ANALYZER_VERSION: Final = 1
SKETCH: Final = {"kind": "ddsketch", "alpha": 0.01, "buckets": 2048}
FINGERPRINT_DIGITS: Final = 16
FLAGS: Final = ("exact", "prefix", "column", "exists", "sortable", "aggregatable", "positions", "contains")

Json = dict[str, object]


class IndexPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to build for each segment of a stream. `hash` is the hash of `document`.

    `fingerprints` are by `family:<name>`, `field:<name>` and `rollup:<name>`.
    """

    hash: str  # "sha256:" and 64 hex digits
    families: tuple[str, ...]
    document: Json
    fingerprints: dict[str, str]

    @property
    def digits(self) -> str:
        """The hash as in object keys."""
        return self.hash.removeprefix("sha256:")

    def family_fingerprint(self, family: str) -> str:
        return self.fingerprints[f"family:{family}"]


class BuildPlan(msgspec.Struct, frozen=True, dict=True):
    """A plan with its registry and profile: everything that a builder needs."""

    plan: IndexPlan
    registry: Registry
    profile: Json

    @property
    def families(self) -> tuple[str, ...]:
        return self.plan.families

    @property
    def profile_kind(self) -> str:
        return str(self.profile.get("kind", "generic"))

    @cached_property
    def view(self) -> RecordView | None:
        """The view of the records; None if search is not configured."""
        return None if self.registry.search is None else RecordView(self.registry)

    @cached_property
    def members(self) -> dict[str, tuple[str, ...]]:
        """The fields of each family in order; for `agg` the rollups."""
        return {} if self.registry.search is None else family_members(self.registry.search)


def index_plan(registry: Registry, profile_kind: str = "generic", *, keyed: bool = False) -> IndexPlan:
    """The plan for a stream. `keyed`: some entry has a routing key."""
    prints: dict[str, str] = {}
    families: dict[str, object] = {}
    document: Json = {"layout": 1, "families": families}
    routed = registry.routing_key is not None
    if keyed or routed:
        families["routing_key_index"] = {"format": FORMATS["routing_key_index"]}
    if routed:
        families["routing_key_lexicon"] = {"format": FORMATS["routing_key_lexicon"]}
    if registry.search is not None:
        fields = {name: _field_json(name, registry) for name in sorted(registry.search.fields)}
        rollups = {name: _rollup_json(name, registry, fields) for name in sorted(registry.search.rollups)}
        prints |= {f"field:{name}": _digest(shape) for name, shape in fields.items()}
        prints |= {f"rollup:{name}": _digest(shape) for name, shape in rollups.items()}
        primary = registry.search.primary_timestamp_field
        document |= {"fields": fields, "rollups": rollups, "primaryTimestampField": primary}
        for family, names in family_members(registry.search).items():
            kind = "rollup" if family == "agg" else "field"
            shape: Json = {"format": FORMATS[family], "of": {n: prints[f"{kind}:{n}"] for n in names}}
            if primary is not None:
                shape["primary"] = [primary, prints[f"field:{primary}"]]
            families[family] = shape
    if profile_kind == "metrics":
        families["mblk"] = {
            "format": FORMATS["mblk"],
            "profile": profile_kind,
            "lens": _all_lens_steps(registry),
        }
    prints |= {f"family:{name}": _digest(shape) for name, shape in families.items()}
    return IndexPlan(
        hash="sha256:" + hashlib.sha256(_canonical_json(document)).hexdigest(),
        families=tuple(name for name in FAMILIES if name in families),
        document=document,
        fingerprints=prints,
    )


def family_members(search: SearchConfig) -> dict[str, tuple[str, ...]]:
    """The fields or rollups of each non-empty family of a search configuration."""
    fields = sorted(search.fields.items())
    found = {
        "exact": tuple(name for name, field in fields if field.exact),
        "col": tuple(name for name, field in fields if field.column or field.sortable or field.aggregatable),
        "fts": tuple(name for name, field in fields if field.kind == "text" or field.prefix),
        "agg": tuple(sorted(search.rollups)),
    }
    return {family: names for family, names in found.items() if names}


def store_plan(plan: IndexPlan, registry: Registry, profile: bytes | None) -> bytes:
    """The object `plans/<hash>.json`. `profile` is the stream's document, None for a generic one."""
    shown: object = {"kind": "generic"}
    if profile is not None:
        shown = msgspec.json.decode(profile, type=dict[str, object])["profile"]
    return msgspec.json.encode({"plan": plan, "registry": msgspec.Raw(registry.to_json()), "profile": shown})


def load_plan(data: bytes) -> BuildPlan:
    """Decode the object `plans/<hash>.json`."""
    stored = msgspec.json.decode(data, type=_StoredPlan)
    return BuildPlan(stored.plan, read_registry(bytes(stored.registry)), stored.profile)


class _StoredPlan(msgspec.Struct):
    plan: IndexPlan
    registry: msgspec.Raw
    profile: Json


# -- shapes: the documents that are hashed -----------------------------------------------------------------


def _field_json(name: str, registry: Registry) -> Json:
    assert registry.search is not None
    field: Field = registry.search.fields[name]
    pointer = field.pointer_at(registry.version)
    shape: Json = {
        "kind": field.kind,
        "pointer": pointer,
        "lens": _lens_steps(pointer, registry),
        "flags": [flag for flag in FLAGS if getattr(field, flag)],
    }
    if field.kind == "keyword":
        shape["normalizer"] = field.normalizer
    if field.kind == "text":
        shape["analyzer"] = [field.analyzer, ANALYZER_VERSION]
    return shape


def _rollup_json(name: str, registry: Registry, fields: dict[str, Json]) -> Json:
    """Includes the fields it reads: another pointer of a dimension means other groups."""
    search = registry.search
    assert search is not None
    rollup: Rollup = search.rollups[name]
    stamp = rollup.timestamp_field or search.primary_timestamp_field or ""
    used = {stamp, *rollup.dimensions}
    measures: Json = {}
    for called, measure in sorted(rollup.measures.items()):
        measures[called] = _measure_json(measure, registry, search, used)
    return {
        "timestamp": stamp,
        "include": _include_json(rollup.include, search, used),
        "dimensions": list(rollup.dimensions),
        "cuts": PARTIAL_ROLLUP_VERSION,
        "format": FORMATS["agg"],
        "intervals": sorted(rollup.intervals),
        "measures": measures,
        "sketch": SKETCH,
        "fields": {field: _digest(fields[field]) for field in sorted(used)},
    }


def _measure_json(measure: Measure, registry: Registry, search: SearchConfig, used: set[str]) -> Json:
    shape = cast("Json", msgspec.to_builtins(measure))
    shape["include"] = _include_json(measure.include, search, used)
    pointers = [text for key, text in shape.items() if key.endswith("JsonPointer")]
    if pointers:
        shape["lens"] = [_lens_steps(cast("str", text), registry) for text in pointers]
    if measure.field is not None:
        used.add(measure.field)
    return shape


def _include_json(text: str | None, search: SearchConfig, used: set[str]) -> object:
    return None if text is None else _query_json(bind_rollup_include(text, search, "include"), used)


def _query_json(clause: BoundQuery, used: set[str]) -> object:
    """A bound query as JSON: its meaning, not its text. Adds its fields to `used`."""
    match clause:
        case All(clauses) | AnyOf(clauses):
            return [type(clause).__name__, *(_query_json(each, used) for each in clauses)]
        case Negation(inner):
            return ["Negation", _query_json(inner, used)]
        case Anywhere(targets):
            return ["Anywhere", *(_query_json(each, used) for each in targets)]
        case _:
            used.add(clause.field)
            return [type(clause).__name__, *msgspec.structs.astuple(clause)]


def _all_lens_steps(registry: Registry) -> object:
    return [registry.lenses[version]["ops"] for version in sorted(registry.lenses)]


def _lens_steps(pointer: str | None, registry: Registry) -> list[object]:
    """The steps of all lenses that may have changed the value at a pointer, the last one first.

    Lenses are proven never to fail, so steps on other pointers cannot change a value.
    """
    tokens = None if pointer is None else parse_pointer(pointer)
    if tokens is None:
        return []
    places = [tokens]
    chain: list[object] = []
    for version in sorted(registry.lenses, reverse=True):
        lens = parse_lens(registry.lenses[version])
        raw = cast("list[object]", registry.lenses[version]["ops"])
        for op, shown in zip(reversed(lens.ops), reversed(raw), strict=True):
            touched = _places(op)
            if any(_overlap(place, one) for place in places for one in touched):
                chain.append([version, shown])
                places += touched
    return chain


def _places(op: LensOp) -> list[tuple[str, ...]]:
    """The pointers that a step reads or writes. Removing an array item moves those behind it."""
    found = [op.source, op.target] if op.op not in ("in", "map", "wrap", "head", "convert") else [op.source]
    return [tokens[:-1] if tokens and tokens[-1].isdigit() else tokens for tokens in found]


def _overlap(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def _canonical_json(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def _digest(value: object) -> str:
    return hashlib.sha256(_canonical_json(value)).hexdigest()[:FINGERPRINT_DIGITS]
