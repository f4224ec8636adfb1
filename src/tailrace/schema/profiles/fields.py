"""Searchable fields of the canonical registries, written down briefly."""

from __future__ import annotations

from typing import Final

FieldConfig = dict[str, object]

LATENCY_MEASURE: Final[FieldConfig] = {"kind": "summary", "field": "duration", "histogram": "log2_v1"}


def keyword_field(pointer: str, *, lowercase: bool, prefix: bool = True) -> FieldConfig:
    declared = _bind_pointer("keyword", pointer)
    if lowercase:
        declared["normalizer"] = "lowercase_v1"
    declared["exact"] = True
    if prefix:
        declared["prefix"] = True
    return declared | {"exists": True, "sortable": True, "aggregatable": True}


def typed_field(kind: str, pointer: str) -> FieldConfig:
    flags = ("exact", "column", "exists", "sortable", "aggregatable")
    return _bind_pointer(kind, pointer) | dict.fromkeys(flags, True)


def text_field(pointer: str) -> FieldConfig:
    return _bind_pointer("text", pointer) | {"analyzer": "unicode_word_v1", "exists": True, "positions": True}


# Fields that lie where their names say.


def keyword_fields(*names: str, lowercase: bool) -> FieldConfig:
    return {name: keyword_field(_pointer(name), lowercase=lowercase) for name in names}


def typed_fields(kind: str, *names: str) -> FieldConfig:
    return {name: typed_field(kind, _pointer(name)) for name in names}


def text_fields(*names: str) -> FieldConfig:
    return {name: text_field(_pointer(name)) for name in names}


def _pointer(name: str) -> str:
    return "/" + name.replace(".", "/")


def _bind_pointer(kind: str, pointer: str) -> FieldConfig:
    return {"kind": kind, "bindings": [{"version": 1, "jsonPointer": pointer}]}
