"""What a candidate schema has seen of a stream that grows while its entries are checked."""

from __future__ import annotations

import pytest

from tailrace.common.errors import TailraceError
from tailrace.log.decide import AppendRequest
from tailrace.log.model import Stream
from tailrace.schema.adoption import AdoptionCandidate, profile_checker, schema_checker
from tailrace.schema.json_values import encode_json_record
from tailrace.schema.profiles.profile import parse_profile

JSON = "application/json"
CHECK = schema_checker({"type": "object"})


def grown(stream: Stream, candidate: AdoptionCandidate | None, *payloads: bytes) -> None:
    """Appends, which the candidate sees if it is given."""
    lengths = None if len(payloads) == 1 else [len(payload) for payload in payloads]
    if candidate is not None:
        candidate.record_append(AppendRequest(b",".join(payloads), JSON, lengths))
    stream.tail += len(payloads)


@pytest.fixture
def stream() -> Stream:
    made = Stream(1, "s", 0)
    made.tail = 5
    return made


def test_what_is_seen_and_fits_is_verified(stream: Stream) -> None:
    candidate = AdoptionCandidate(stream, CHECK)
    candidate.verify()
    grown(stream, candidate, b"{}")
    grown(stream, candidate, b"{}", b'{"a":1}')
    candidate.verify()
    assert candidate.last_read == 5


def test_an_entry_that_does_not_fit_is_named(stream: Stream) -> None:
    candidate = AdoptionCandidate(stream, CHECK)
    grown(stream, candidate, b"{}", b"5")
    grown(stream, candidate, b"6")
    with pytest.raises(TailraceError) as refused:
        candidate.verify()
    assert refused.value.extra == {"offset": stream.offset(7)}
    assert "does not fit: (root) value is not of type" in refused.value.message


def test_entries_that_came_another_way_are_missed(stream: Stream) -> None:
    candidate = AdoptionCandidate(stream, CHECK)
    grown(stream, None, b"{}")
    with pytest.raises(TailraceError) as refused:
        candidate.verify()
    assert refused.value.code == "conflict"
    grown(stream, candidate, b"{}")
    with pytest.raises(TailraceError, match="changed while its entries were checked"):
        candidate.verify()


def test_appends_that_were_rolled_back_are_seen_again(stream: Stream) -> None:
    candidate = AdoptionCandidate(stream, CHECK)
    grown(stream, candidate, b"{}", b"{}")
    stream.tail = 5
    candidate.verify()
    grown(stream, candidate, b"{}")
    candidate.verify()
    grown(stream, None, b"{}")
    with pytest.raises(TailraceError) as refused:
        candidate.verify()
    assert refused.value.code == "conflict"


def test_a_stream_that_was_deleted_is_not_found(stream: Stream) -> None:
    candidate = AdoptionCandidate(stream, CHECK)
    stream.removed = True
    with pytest.raises(TailraceError) as refused:
        candidate.verify()
    assert refused.value.code == "not_found"


def test_a_record_fits_a_profile_if_it_would_be_stored_as_it_is() -> None:
    profile = parse_profile({"kind": "evlog", "redactKeys": ["pin"]})
    check = profile_checker(profile)
    stored = encode_json_record(profile.accept({"service": "a", "pin": 5}, 1_767_225_600_000))
    assert check(stored) is None
    assert check(memoryview(stored)) is None
    assert (
        check(stored.replace(b'"[REDACTED]"', b'"1234"'))
        == "/context is not in the form that the evlog profile stores"
    )
    assert check(b'{"service":"a"}') is not None
    assert check(b"5") == "evlog record must be an object"
    assert check(b'{"a":1e999}') == "(root) record has a number out of range"
