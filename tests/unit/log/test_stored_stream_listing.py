"""Listings of streams that are in the hot store only."""

from __future__ import annotations

from pathlib import Path

from support.log_harness import LogHarness
from tailrace.common.limits import Limits
from tailrace.log.decide import CreateRequest
from tailrace.log.listing import list_streams
from tailrace.log.transaction import ignore_reply
from tailrace.server.index_status import read_profile_kind


def test_a_stored_stream_is_listed_with_its_profile(tmp_path: Path) -> None:
    log = LogHarness(tmp_path, Limits())
    try:
        log.call(log.log.create, CreateRequest("a", "application/json"), ignore_reply, None)
        log.settle()
        document = b'{"apiVersion":"durable.streams/profile/v1","profile":{"kind":"evlog"}}'
        stream = log.find("a")
        assert stream is not None
        log.call(log.log.describe, stream, "profile", document, ignore_reply, None)
        log.settle()
        kind = read_profile_kind(stream)
        assert kind != "generic"
        log.call(log.log.rotate_journal)
        log.settle()
        log.checkpoint(tell=True)
        log.reopen()
        assert "a" not in log.log.streams.by_name, "only in the hot store"
        (listed,) = list_streams(log.log, "", "", 10, False)
        assert read_profile_kind(listed) == kind
    finally:
        log.close()
