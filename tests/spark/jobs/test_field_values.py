"""The values that Spark's workers take out of records are those of the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.companions import Split, Stored, plan_of, rows_in
from support.pipeline import Shelf
from tailrace.schema.registry import Registry, VersionBoundary
from tailrace.schema.search_config import parse_search_config
from tailrace.search.index_files.format import decode_value
from tailrace.spark.jobs.index_build import IndexBuildJob

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CORPUS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "corpus" / "values" / "vectors.json").read_text(encoding="utf-8")
)


def _fields() -> dict[str, Any]:
    """The fields of the vectors, each in every family that takes it."""
    more = {"exact": True, "column": True}
    return {
        name: field if field["kind"] == "text" else {**field, **more}
        for name, field in CORPUS["fields"].items()
    }


def test_v1_v2_v3_workers_take_the_values_of_the_shared_vectors(spark: SparkSession, tmp_path: Path) -> None:
    config = parse_search_config({"fields": _fields()})
    registry = Registry(
        name="s", version=CORPUS["version"], search=config, boundaries=(VersionBoundary(0, 2),)
    )
    shelf = Shelf(tmp_path / "store", plan_of(registry))
    vectors = dict(enumerate(CORPUS["vectors"], 1))
    shelf.seal([Stored(entry, vector["payload"].encode()) for entry, vector in vectors.items()])
    for reference in (False, True):
        (outcome,) = IndexBuildJob(spark, shelf.url, cores=2, reference=reference).run(shelf.works())
        assert outcome.status == "built", outcome
        files = {file.family: shelf.get(file.object) for file in outcome.files}
        columns = [name for name, field in config.fields.items() if field.kind != "text"]
        for row in rows_in(files["col"]):
            found = {name: row[name] for name in columns if row[name]}
            expected = vectors[row["_entry"]]["values"]
            expected = {name: values for name, values in expected.items() if name in columns}
            # Compared as JSON, so that 1, 1.0 and true are three different things.
            assert json.dumps(found, sort_keys=True) == json.dumps(expected, sort_keys=True)
        _check_exact(rows_in(files["exact"]), vectors, config.fields)
        _check_tokens(files["fts"], vectors)


def _check_exact(rows: list[dict[str, Any]], vectors: dict[int, Any], fields: Any) -> None:
    """Each value leads to its entries and to no others, and `has` to all that have one."""
    expected: dict[tuple[str, str | None], set[int]] = {}
    for entry, vector in vectors.items():
        for name, values in vector["values"].items():
            if fields[name].kind != "text":
                for value in [None, *values]:
                    key = None if value is None else json.dumps(value)
                    expected.setdefault((name, key), set()).add(entry)
    found: dict[tuple[str, str | None], set[int]] = {}
    for row in rows:
        stored, name = row["value"], row["field"]
        if fields[name].kind == "text":
            continue
        key = None if stored is None else json.dumps(decode_value(stored, fields[name].kind))
        found.setdefault((name, key), set()).update(row["entries"])
    assert found == expected


def _check_tokens(data: bytes, vectors: dict[int, Any]) -> None:
    split = Split(data)
    expected: dict[str, set[int]] = {}
    for entry, vector in vectors.items():
        for tokens in vector.get("tokens", []):
            for token in tokens:
                expected.setdefault(token, set()).add(entry)
    told = {entry for entry, vector in vectors.items() if "tokens" in vector}
    found = {
        row["term"]: set(row["entries"]) & told for row in rows_in(split.terms) if row["term"] is not None
    }
    assert {term: entries for term, entries in found.items() if entries} == expected
