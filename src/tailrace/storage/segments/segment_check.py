"""Takes a whole segment apart: what it holds, and whether every checksum in and around it is right."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

from tailrace.storage.segments import segment_tail
from tailrace.storage.segments.segment_reader import Footer, read_row_group
from tailrace.storage.segments.segments import CorruptSegmentError, SegmentInfo, SegmentRows, segment_name

_SEGMENT_NAME = re.compile(r"(\d{10})-(\d{20})-(\d{20})\.([0-9a-f]{16})\.parquet$")


def file_footer(raw: bytes) -> Footer:
    """The footer of a file that is there as a whole."""
    tail = segment_tail.find_tail(raw, len(raw))
    assert isinstance(tail, bytes), "all of the file was given"
    return Footer(segment_tail.pack_tail(tail))


def read_all_rows(raw: bytes, footer: Footer) -> Iterator[SegmentRows]:
    view = memoryview(raw)
    for index, group in enumerate(footer.row_groups):
        yield read_row_group(footer, index, view[group.start : group.stop])


def describe_entries(raw: bytes) -> Iterator[dict[str, object]]:
    """Every entry, as somebody would want to see it: bytes that are no text are in base64."""
    footer = file_footer(raw)
    separator = 1 if footer.json else 0
    for rows in read_all_rows(raw, footer):
        start = 0
        for index, end in enumerate(rows.ends):
            shown: dict[str, object] = {"entry": rows.first + index, "time_ns": rows.times[index]}
            key = None if rows.keys is None else rows.keys[index]
            if key is not None:
                shown |= _describe_value("key", key)
            yield shown | _describe_value("payload", rows.body[start:end])
            start = end + separator


def _describe_value(name: str, value: bytes) -> dict[str, str]:
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": b64encode(value).decode()}


def check_segment(raw: bytes, info: SegmentInfo) -> list[str]:
    """Everything that is wrong with a file that should be the recorded segment; nothing, if all is well."""
    try:
        sha256 = hashlib.sha256(raw).hexdigest()
        problems = [] if sha256 == info.sha256 else [f"its SHA-256 is {sha256}, recorded is {info.sha256}"]
        footer = file_footer(raw)
        problems += _differences(footer, info, len(raw))
        payload = hashlib.sha256()
        payload_bytes = 0
        first_ns = last_ns = None
        for rows in read_all_rows(raw, footer):
            payload_bytes += _add_payload(payload, rows, footer.json)
            first_ns = rows.times[0] if first_ns is None else first_ns
            last_ns = rows.times[-1]
    except CorruptSegmentError as error:
        return [str(error)]
    if payload.hexdigest() != footer.facts["payload_sha256"]:
        problems.append("its payloads do not have their checksum")
    if (payload_bytes, first_ns, last_ns) != (info.payload_bytes, info.first_ns, info.last_ns):
        problems.append("its payload bytes or append times are not the recorded ones")
    return problems


def describe_segment(raw: bytes, name: str) -> dict[str, Any]:
    """What a file holds, for people; with a `problem` where it is not what it says it is."""
    described: dict[str, Any] = {"file": name, "bytes": len(raw)}
    try:
        footer = file_footer(raw)
        described |= {
            "sha256": hashlib.sha256(raw).hexdigest(),
            **{fact: footer.facts.get(fact) for fact in ("version", "name", "stream_id", "content_type")},
            "json": footer.json,
            "epoch": footer.epoch,
            "first": footer.first,
            "last": footer.last,
            "rows": footer.last - footer.first + 1,
            "payload_sha256": footer.facts.get("payload_sha256"),
            "row_groups": [group._asdict() for group in footer.row_groups],
        }
        info = _as_described(described, raw, footer)
        described |= {"payload_bytes": info.payload_bytes, "first_ns": info.first_ns, "last_ns": info.last_ns}
        problems = check_segment(raw, info)
        named = _SEGMENT_NAME.search(name)
        if named and not info.key.endswith(named[0]):
            problems.append(f"by its content it should be called {info.key}")
    except CorruptSegmentError as error:
        problems = [str(error)]
    if problems:
        described["problem"] = "; ".join(problems)
    return described


def _as_described(described: dict[str, Any], raw: bytes, footer: Footer) -> SegmentInfo:
    """What would be recorded about a file, if it is taken at its word."""
    first_ns = last_ns = payload_bytes = 0
    for rows in read_all_rows(raw, footer):
        first_ns = rows.times[0] if rows.first == footer.first else first_ns
        last_ns = rows.times[-1]
        payload_bytes += len(rows.body) - (len(rows.ends) - 1 if footer.json else 0)
    epoch, first, last, sha256 = footer.epoch, footer.first, footer.last, described["sha256"]
    return SegmentInfo(
        key=segment_name(epoch, first, last, sha256),
        epoch=epoch,
        first=first,
        last=last,
        rows=described["rows"],
        bytes=len(raw),
        payload_bytes=payload_bytes,
        sha256=sha256,
        first_ns=first_ns,
        last_ns=last_ns,
    )


def _differences(footer: Footer, info: SegmentInfo, size: int) -> list[str]:
    found = {"epoch": footer.epoch, "first": footer.first, "last": footer.last, "bytes": size}
    found["rows"] = footer.last - footer.first + 1
    said = {name: footer.facts.get(name) for name in ("epoch", "first", "last", "rows")}
    return [
        f"its {name} is {value}, recorded is {getattr(info, name)}"
        for name, value in found.items()
        if value != getattr(info, name) or said.get(name, str(value)) != str(value)
    ]


def _add_payload(digest: Any, rows: SegmentRows, json: bool) -> int:
    """Hash the entries of some rows without what joins them; answers how many bytes they are."""
    if not json:
        digest.update(rows.body)
        return len(rows.body)
    body = memoryview(rows.body)
    start = 0
    for end in rows.ends:
        digest.update(body[start:end])
        start = end + 1
    return len(body) - (len(rows.ends) - 1)
