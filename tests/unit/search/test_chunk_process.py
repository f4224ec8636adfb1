"""Chunks of the tail index that a process of their own makes: they are the same as those made here."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from tailrace.schema.registry import Registry, VersionBoundary
from tailrace.schema.search_config import parse_search_config
from tailrace.search.chunk_process import ChunkProcess, ChunkProcessError, build_chunk
from tailrace.search.chunks import Chunk
from tailrace.search.records import RecordDecoder, RecordView


def field(kind: str, pointer: str, **flags: object) -> dict[str, Any]:
    return {"kind": kind, "bindings": [{"version": 1, "jsonPointer": pointer}], **flags}


FIELDS = {
    "id": field("keyword", "/id", exact=True, prefix=True),
    "n": field("integer", "/n", exact=True, column=True),
    "text": field("text", "/text", analyzer="unicode_word_v1", positions=True),
}
REGISTRY = Registry(
    name="s",
    version=1,
    boundaries=(VersionBoundary(0, 1),),
    schemas={1: {}},
    search=parse_search_config({"fields": FIELDS}),
)
ROWS = [
    orjson.dumps({"id": f"id{number % 7}", "n": number, "text": f"some words and word{number % 3}"})
    for number in range(500)
] + [b"1", b'"x"', b"null", b'{"id":"\\ud83d","n":1e400}', b"[]"]


@pytest.fixture
def process() -> Iterator[ChunkProcess]:
    made = ChunkProcess(idle_s=0.0)
    yield made
    made.close()


def made_here() -> Chunk:
    view = RecordView(REGISTRY)
    return build_chunk(view, RecordDecoder(view, list(view.config.fields)), 11, ROWS)


def described(chunk: Chunk) -> object:
    columns = {
        name: (list(one.terms.all()), list(one.ranks), one.present, one.multiple)
        for name, one in chunk.columns.items()
    }
    return chunk.first, chunk.last, chunk.memory_bytes, columns


def test_a_chunk_from_the_process_is_the_one_made_here(process: ChunkProcess) -> None:
    assert described(process.build(REGISTRY.to_json(), 11, ROWS)) == described(made_here())
    views: list[bytes | memoryview] = [memoryview(row) for row in ROWS]
    assert described(process.build(REGISTRY.to_json(), 11, views)) == described(made_here())


def test_a_process_that_was_killed_is_started_again(process: ChunkProcess) -> None:
    process.build(REGISTRY.to_json(), 11, ROWS)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ChunkProcessError):
        process.build(REGISTRY.to_json(), 11, ROWS)
    assert described(process.build(REGISTRY.to_json(), 11, ROWS)) == described(made_here())


def test_what_cannot_be_made_does_not_end_the_process(process: ChunkProcess) -> None:
    process.build(REGISTRY.to_json(), 11, ROWS)
    pid = process.pid
    with pytest.raises(ChunkProcessError):
        process.build(b"no registry", 11, ROWS)
    assert described(process.build(REGISTRY.to_json(), 11, ROWS)) == described(made_here())
    assert process.pid == pid


def test_an_idle_process_is_ended(process: ChunkProcess) -> None:
    process.build(REGISTRY.to_json(), 11, ROWS)
    process.end_if_idle()
    assert process.pid is None
