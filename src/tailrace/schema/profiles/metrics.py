"""The `metrics` profile: a record is the summary of one series over one interval."""

from __future__ import annotations

from typing import Final, cast

from tailrace.schema.json_values import invalid_request, shorten
from tailrace.schema.lenses import value_text
from tailrace.schema.profiles.normalisation import to_integer, to_number, to_trimmed

API_VERSION: Final = "durable.streams/metrics/v1"

Record = dict[str, object]


def normalise_metric(record: object) -> Record:
    """The canonical record, or the refusal the given one deserves. Keys it has no place for are dropped."""
    if not isinstance(record, dict):
        raise invalid_request("metrics record must be an object")
    given = cast("Record", record)
    if given.get("kind") is not None and to_trimmed(given["kind"]) != "interval":
        raise invalid_request("metrics record.kind must be interval")
    metric, unit = _named(given, "metric"), _named(given, "unit")
    start, end, interval_ms = _window(given)
    metric_kind = _text(given, "metricKind", "summary")
    temporality = _text(given, "temporality", "delta")
    stream, instance = _text(given, "stream"), _text(given, "instance")
    tags = _tags(given)
    pairs = sorted([f"{key}={value}" for key, value in tags.items()])
    dimension_key = "\0".join(pairs) if pairs else None
    series = (metric_kind, temporality, metric, unit, stream, instance, dimension_key)
    summary = _summary(given)
    canonical: Record = {
        "apiVersion": API_VERSION,
        "kind": "interval",
        "metric": metric,
        "unit": unit,
        "metricKind": metric_kind,
        "temporality": temporality,
        "windowStart": start,
        "windowEnd": end,
        "intervalMs": interval_ms,
        "instance": instance,
        "stream": stream,
        "tags": tags,
        "attributes": tags,
        "dimensionPairs": pairs,
        "dimensionKey": dimension_key,
        "seriesKey": "|".join([part or "" for part in series]),
        "count": summary["count"],
        "sum": summary["sum"],
        "min": summary["min"],
        "max": summary["max"],
        **_statistics(given, summary),
        "buckets": summary["histogram"],
        "summary": summary,
    }
    if given.get("sketch") is not None:
        canonical["sketch"] = given["sketch"]
    return canonical


def metric_routing_key(record: Record) -> str:
    return cast("str", record["seriesKey"])


def _text(given: Record, key: str, default: str | None = None) -> str | None:
    value = given.get(key)
    if value is not None and type(value) is not str:
        raise invalid_request(f"metrics record.{key} must be a string")
    return to_trimmed(value) or default


def _named(given: Record, key: str) -> str:
    text = to_trimmed(given.get(key))
    if text is None:
        raise invalid_request(f"metrics record.{key} must be a non-empty string")
    return text


def _window(given: Record) -> tuple[int, int, int]:
    start, end = to_integer(given.get("windowStart")), to_integer(given.get("windowEnd"))
    if start is None or end is None:
        raise invalid_request("metrics record.windowStart and windowEnd must be integers")
    if end < start:
        raise invalid_request("metrics record.windowEnd must be >= windowStart")
    if given.get("intervalMs") is None:
        return start, end, end - start
    interval_ms = to_integer(given["intervalMs"])
    if interval_ms is None or interval_ms < 0:
        raise invalid_request("metrics record.intervalMs must be an integer >= 0")
    return start, end, interval_ms


def _tags(given: Record) -> dict[str, str]:
    """Scalars as text, keys in the order of their bytes (which is that of their code points)."""
    key = "attributes" if given.get("attributes") is not None else "tags"
    value = given.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid_request(f"metrics record.{key} must be an object")
    tags: dict[str, str] = {}
    for name, item in sorted(cast("Record", value).items()):
        if isinstance(item, dict | list):
            raise invalid_request(
                f"metrics record.{key}.{shorten(name)} must be a string, a number or a boolean"
            )
        if item is not None:
            tags[name] = value_text(item)
    return tags


def _summary(given: Record) -> Record:
    summary = given.get("summary")
    if summary is None:
        parts: Record = {}
    elif isinstance(summary, dict):
        parts = cast("Record", summary)
    else:
        raise invalid_request("metrics record.summary must be an object")
    count = to_integer(_either(given, parts, "count"))
    if count is None or count < 0:
        raise invalid_request("metrics interval requires count")
    total = to_number(_either(given, parts, "sum"))
    if total is None:
        raise invalid_request("metrics interval requires sum")
    histogram = _histogram(given.get("buckets"), "buckets")
    if not histogram:
        histogram = _histogram(parts.get("histogram"), "summary.histogram")
    return {
        "count": count,
        "sum": total,
        "min": _number(_either(given, parts, "min"), "min") if count else None,
        "max": _number(_either(given, parts, "max"), "max") if count else None,
        "histogram": histogram,
    }


def _either(given: Record, parts: Record, key: str) -> object:
    value = given.get(key)
    return parts.get(key) if value is None else value


def _number(value: object, key: str) -> int | float | None:
    if value is None:
        return None
    found = to_number(value)
    if found is None:
        raise invalid_request(f"metrics record.{key} must be a number")
    return found


def _histogram(value: object, key: str) -> dict[str, int | float]:
    """How often each bucket was hit; a bucket is named by its lower bound."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid_request(f"metrics record.{key} must be an object")
    histogram: dict[str, int | float] = {}
    for bucket, item in cast("Record", value).items():
        count = to_number(item)
        if count is None or count < 0:
            raise invalid_request(f"metrics record.{key}.{shorten(bucket)} must be a number >= 0")
        if count:
            histogram[bucket] = count
    return histogram


def _statistics(given: Record, summary: Record) -> Record:
    avg = _number(given.get("avg"), "avg")
    if avg is None:
        count, total = cast("int", summary["count"]), cast("float", summary["sum"])
        avg = total / count if count else 0
    statistics: Record = {"avg": avg}
    for key, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        value = _number(given.get(key), key)
        if value is None:
            value = _percentile(cast("dict[str, float]", summary["histogram"]), share)
        statistics[key] = value
    return statistics


def _percentile(histogram: dict[str, float], share: float) -> int | float:
    """The bucket in which that share of all hits is reached; 0 if there are none."""
    bounds = ((_bound(name), count) for name, count in histogram.items())
    hits = sorted([(bound, count) for bound, count in bounds if bound is not None])
    wanted = sum([count for _, count in hits]) * share
    reached = 0.0
    for bound, count in hits:
        reached += count
        if reached >= wanted:
            return bound
    return hits[-1][0] if hits else 0


def _bound(name: str) -> int | float | None:
    try:
        bound = float(name)
    except ValueError:
        return None
    return int(bound) if abs(bound) < 2**53 and bound.is_integer() else to_number(bound)
