"""Searchable fields of the canonical registries, written down briefly."""

from __future__ import annotations

from typing import Final

Declared = dict[str, object]

LATENCY: Final[Declared] = {"kind": "summary", "field": "duration", "histogram": "log2_v1"}


def keyword(pointer: str, *, lowercase: bool, prefix: bool = True) -> Declared:
    declared = _bound("keyword", pointer)
    if lowercase:
        declared["normalizer"] = "lowercase_v1"
    declared["exact"] = True
    if prefix:
        declared["prefix"] = True
    return declared | {"exists": True, "sortable": True, "aggregatable": True}


def typed(kind: str, pointer: str) -> Declared:
    flags = ("exact", "column", "exists", "sortable", "aggregatable")
    return _bound(kind, pointer) | dict.fromkeys(flags, True)


def text(pointer: str) -> Declared:
    return _bound("text", pointer) | {"analyzer": "unicode_word_v1", "exists": True, "positions": True}


# Fields that lie where their names say.


def keywords(*names: str, lowercase: bool) -> Declared:
    return {name: keyword(_pointer(name), lowercase=lowercase) for name in names}


def typed_as(kind: str, *names: str) -> Declared:
    return {name: typed(kind, _pointer(name)) for name in names}


def texts(*names: str) -> Declared:
    return {name: text(_pointer(name)) for name in names}


def _pointer(name: str) -> str:
    return "/" + name.replace(".", "/")


def _bound(kind: str, pointer: str) -> Declared:
    return {"kind": kind, "bindings": [{"version": 1, "jsonPointer": pointer}]}
