"""Instants are kept as nanoseconds in 64 bits, which end in the year 2262. What lies beyond never comes."""

from __future__ import annotations

import pytest

from conftest import StartServer
from support.calls import Caller, eventually

LAST = "2262-04-11T23:47:16.854Z"
NEVER = "9999-12-31T23:59:59.999Z"
# Asked for, and shown.
INSTANTS = {
    LAST: LAST,
    "2262-04-11T23:47:16.854775806Z": LAST,
    "2262-04-11T23:47:16.854775807Z": NEVER,
    "2262-04-11T23:47:17Z": NEVER,
    "2300-01-01T00:00:00+14:00": NEVER,
    NEVER: NEVER,
}
TEXT = {"Content-Type": "text/plain"}


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped"])
def test_instants_beyond_the_year_2262_last_for_ever(start_server: StartServer, kill: bool) -> None:
    server = start_server("--journal-file-bytes", "64KiB")
    call = Caller(server)
    for number, asked in enumerate(INSTANTS):
        made = call("PUT", f"far/{number}", headers={**TEXT, "Stream-Expires-At": asked})
        assert made.status == 201, asked
    window = {**TEXT, "Stream-TTL": str(2**53 - 1)}
    assert call("PUT", "window", headers=window).status == 201

    def look() -> None:
        for number, (asked, shown) in enumerate(INSTANTS.items()):
            assert call("HEAD", f"far/{number}").headers["stream-expires-at"] == shown
            # What was asked for is confirmed, and so is what was shown.
            for instant in (asked, shown) if shown == NEVER else (asked,):
                again = call("PUT", f"far/{number}", headers={**TEXT, "Stream-Expires-At": instant})
                assert again.status == 200, (asked, instant)
        head = call("HEAD", "window").headers
        assert (head["stream-ttl"], head["stream-expires-at"]) == (str(2**53 - 1), NEVER)
        assert call("PUT", "window", headers=window).status == 200
        listed = {row["name"]: row["expires_at"] for row in call("GET", "/v1/streams?prefix=far/").body}
        assert list(listed.values()) == list(INSTANTS.values())

    look()
    server.restart(kill=kill)
    look()
    # The same from the hot store: once the journal has moved on, nothing else has them.
    for _ in range(8):
        call("PUT", "filler", headers=TEXT)
        assert call("POST", "filler", b"x" * 15_000, headers=TEXT).status == 204
    eventually(lambda: list((server.data_dir / "journal").iterdir()), lambda files: len(files) <= 2)
    server.restart(kill=kill)
    look()
    assert call("GET", "far/4").status == 200


def test_all_instants_that_never_come_are_the_same(start_server: StartServer) -> None:
    call = Caller(start_server())
    first = {**TEXT, "Stream-Expires-At": "2400-01-01T00:00:00Z"}
    assert call("PUT", "a", headers=first).status == 201
    assert call("PUT", "a", headers={**TEXT, "Stream-Expires-At": "3000-01-01T00:00:00Z"}).status == 200
    refused = call("PUT", "a", headers={**TEXT, "Stream-Expires-At": LAST})
    assert (refused.status, refused.code) == (409, "stream_exists")
