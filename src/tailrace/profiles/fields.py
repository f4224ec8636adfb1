"""Searchable fields of the canonical registries, written down briefly."""

from __future__ import annotations

Declared = dict[str, object]


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


def _bound(kind: str, pointer: str) -> Declared:
    return {"kind": kind, "bindings": [{"version": 1, "jsonPointer": pointer}]}
