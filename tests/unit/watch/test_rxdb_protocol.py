"""What becomes of pushed documents, and where checkpoints stand: decided without a server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.common.errors import TailraceError
from tailrace.watch.access_rules import AccessRule
from tailrace.watch.document import RESERVED_FIELDS
from tailrace.watch.resume_tokens import KeyRing, TokenSigner
from tailrace.watch.rxdb.protocol import (
    Checkpoint,
    PullCursor,
    PushRow,
    PushVerdict,
    check_deleted_field,
    decide_push,
    encode_checkpoint,
    json_equal,
    read_checkpoint,
    read_push_rows,
)

OLD, NEW, OTHER = {"n": 1}, {"n": 2}, {"n": 3}
SIGNER = TokenSigner(KeyRing.first(0), 1000, lambda: 0)


def row(new: Any, assumed: Any, *, deleted: bool = False, assumed_deleted: bool = False) -> PushRow:
    return PushRow("a", new, deleted, assumed, assumed_deleted)


@pytest.mark.parametrize(
    ("current", "is_deleted", "pushed", "verdict"),
    [
        # Nothing there.
        (None, False, row(NEW, None), "insert"),
        (None, False, row(NEW, OLD, assumed_deleted=True), "insert"),
        (None, False, row(NEW, None, deleted=True), "insert"),
        (None, False, row(NEW, OLD), "conflict"),
        (None, False, row(NEW, OLD, deleted=True), "conflict"),
        # A tombstone.
        (OLD, True, row(NEW, None), "insert"),
        (OLD, True, row(OLD, OLD, assumed_deleted=True), "insert"),
        (OLD, True, row(NEW, None, deleted=True), "same"),
        (OLD, True, row(NEW, OLD, deleted=True), "same"),
        (OLD, True, row(NEW, OLD), "conflict"),
        # A document.
        (OLD, False, row(NEW, OLD), "replace"),
        (OLD, False, row(OLD, OLD, deleted=True), "replace"),
        (OLD, False, row(NEW, OTHER), "conflict"),
        (OLD, False, row(NEW, OTHER, deleted=True), "conflict"),
        (OLD, False, row(NEW, None), "conflict"),
        (OLD, False, row(NEW, OLD, assumed_deleted=True), "conflict"),
        # The same push once more.
        (NEW, False, row(NEW, OLD), "same"),
        (NEW, False, row(NEW, None), "same"),
    ],
)
def test_decisions(current: Any, is_deleted: bool, pushed: PushRow, verdict: PushVerdict) -> None:
    assert decide_push(current, is_deleted, pushed) == verdict


def test_numbers_are_compared_as_clients_have_them() -> None:
    assert json_equal({"n": 1, "list": [2, {"x": 0.0}]}, {"list": [2.0, {"x": 0}], "n": 1.0})
    assert json_equal(2**53 + 1, 2**53), "a script cannot tell them apart"
    assert not json_equal(1, True)
    assert not json_equal(None, 0)
    assert not json_equal("1", 1)
    assert not json_equal([1], [1, 1])
    assert not json_equal({"a": 1}, {"a": 1, "b": None})


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(_json)
def test_what_is_equal_to_itself(value: Any) -> None:
    assert json_equal(value, value)


@given(st.dictionaries(st.sampled_from(["id", "version", "_rev", "_meta", "updatedAt", "n", "m"]), _json))
def test_stamps_of_the_server_do_not_count(state: dict[str, Any]) -> None:
    """Whatever the client has of them: the decision is about its own fields."""
    wanted = {**state, "id": "a"}
    bare = {name: value for name, value in wanted.items() if name in ("n", "m")}
    (found,) = read_push_rows([{"newDocumentState": wanted, "assumedMasterState": wanted}], 500, "_deleted")
    assert (found.content, found.assumed) == (bare, bare)
    assert decide_push(bare, False, found) == "same"


def test_rows_that_cannot_be_read() -> None:
    for wrong in (
        None,
        {},
        [1],
        [{}],
        [{"newDocumentState": 1}],
        [{"newDocumentState": {}}],
        [{"newDocumentState": {"id": 7}}],
        [{"newDocumentState": {"id": "a"}, "assumedMasterState": 3}],
        [{"newDocumentState": {"id": "a", "_deleted": 1}}],
    ):
        with pytest.raises(TailraceError) as refused:
            read_push_rows(wrong, 500, "_deleted")
        assert refused.value.code == "invalid_request"
    rows = [{"newDocumentState": {"id": "a"}}] * 3
    assert len(read_push_rows(rows, 3, "_deleted")) == 3
    with pytest.raises(TailraceError, match="at most 2"):
        read_push_rows(rows, 2, "_deleted")


def test_fields_that_mark_deleted_documents() -> None:
    assert check_deleted_field("deleted") == "deleted"
    for wrong in (*(RESERVED_FIELDS - {"deleted"}), "", "a b", "a.b", 7, None):
        with pytest.raises(TailraceError):
            check_deleted_field(wrong)


# -- checkpoints ---------------------------------------------------------------------------------------


def walk(seqs: list[int], began: list[int] | None = None, held: list[int] | None = None) -> PullCursor:
    return PullCursor("app", "orders", 1, b"", seqs, began or [], held or [])


def test_a_checkpoint_comes_back_as_it_was() -> None:
    given = walk([3, 0], [5, 5])
    made = encode_checkpoint(given, 17, "a", SIGNER)
    assert set(made) == {"updatedAt", "id", "pos"}
    assert read_checkpoint(made, SIGNER) == Checkpoint(17, "a", given)
    assert read_checkpoint({"updatedAt": 17, "id": "a"}, SIGNER) == Checkpoint(17, "a", None)
    assert read_checkpoint(None, SIGNER) is None


def test_checkpoints_that_cannot_be_read() -> None:
    good = encode_checkpoint(walk([1]), 17, "a", SIGNER)
    foreign = TokenSigner(KeyRing.first(0), 1000, lambda: 0)
    for wrong in (
        7,
        [],
        "x",
        {},
        {"updatedAt": 1},
        {"updatedAt": "1", "id": "a"},
        {"updatedAt": -1, "id": "a"},
        {"updatedAt": True, "id": "a"},
        {"updatedAt": 1, "id": 2},
        {**good, "pos": good["pos"][:-4] + "AAAA"},
        {**good, "pos": 3},
        {**good, "pos": ""},
        {**good, "more": 1},
        encode_checkpoint(walk([1]), 17, "a", foreign),
        {**good, "pos": SIGNER.sign(b"position:", walk([1]))},
    ):
        with pytest.raises(TailraceError) as refused:
            read_checkpoint(wrong, SIGNER)
        assert refused.value.code == "invalid_checkpoint"


def test_what_was_hidden_before_the_walk_began_is_not_news() -> None:
    going = walk([0, 0], [4, 2])
    assert [going.changed_since_start(0, seq) for seq in (4, 5)] == [False, True]
    going = going.advanced([4, 1])
    assert going.began == [4, 2]
    assert going.advanced([4, 2]).began == [], "the walk is past it"


def test_which_forgotten_tombstones_are_missed() -> None:
    assert not walk([0, 0]).misses([9, 9]), "it has nothing yet"
    assert not walk([3, 0], [9, 9]).misses([9, 9]), "they were gone before it began"
    assert walk([3, 0], [9, 9]).misses([10, 9])
    assert not walk([3, 0], [9, 9]).misses([9, 10]), "it has nothing of the second partition"
    assert walk([9, 9]).misses([9, 10])
    assert not walk([9, 9]).misses([9, 9])


def test_another_rule_begins_again_and_remembers_what_the_client_has() -> None:
    again = walk([7, 3]).restarted(b"other")
    assert (again.seqs, again.began, again.held, again.digest) == ([0, 0], [], [7, 3], b"other")
    assert again.changed_since_start(0, 1), "whatever cannot be read now is taken back"
    assert again.misses([8, 0])
    assert not again.misses([7, 3])
    assert again.advanced([8, 2]).held == [7, 3]
    assert again.advanced([8, 3]).held == []


def test_a_renewed_token_means_the_same() -> None:
    rule = AccessRule("doc.org == request.auth.claims.org", "readRule")
    asker: dict[str, Any] = {"userId": "u", "claims": {"org": "x", "exp": 1, "iat": 1}, "roles": []}
    renewed = {**asker, "claims": {"org": "x", "exp": 2, "iat": 2}}
    other = {**asker, "claims": {"org": "y", "exp": 1, "iat": 1}}
    assert rule.fingerprint(asker) == rule.fingerprint(renewed) != rule.fingerprint(other)
    opaque = AccessRule("doc.owner in request.auth.claims.teams", "readRule")
    assert opaque.fingerprint({**asker, "claims": {"teams": ["a"], "exp": 1}}) == opaque.fingerprint(
        {**asker, "claims": {"teams": ["a"], "exp": 2}}
    )
    missing = opaque.fingerprint(asker)
    assert missing == opaque.fingerprint(renewed) != opaque.fingerprint(other)
