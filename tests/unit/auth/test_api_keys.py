"""API keys, the file they are kept in, and tokens that are good no more."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import jwt
import pytest

from tailrace.auth import (
    GrantStore,
    Identity,
    IdentityFile,
    IdentityStore,
    TokenVerifier,
    api_keys,
    create_api_key,
    create_token,
)
from tailrace.auth import (
    identities as identity_file,
)
from tailrace.auth import (
    identities as revocations,
)
from tailrace.common.clock import FakeClock
from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings

SECRET = "a shared secret that is long enough to be used"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "identity.json"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def book_at(path: Path, clock: FakeClock) -> IdentityStore:
    return IdentityStore(IdentityFile(path), clock)


def verifier(path: Path, clock: FakeClock, **settings: Any) -> TokenVerifier:
    given = {"auth_jwt_secret": SECRET, "data_dir": path.parent, **settings}
    return TokenVerifier(Settings(**given), clock)


def header(token: str) -> bytes:
    return b"Bearer " + token.encode()


def reason(check: TokenVerifier, token: str) -> str:
    with pytest.raises(TailraceError) as caught:
        check.verify(header(token))
    assert caught.value.code == "unauthorized"
    return caught.value.message


def test_a_key_is_an_identity_and_its_secret_is_nowhere(path: Path, clock: FakeClock) -> None:
    key, text = create_api_key(
        sub="ci", scopes=["write", "read"], streams=["builds/"], dbs=["app"], actor_id="@(ci/1)", clock=clock
    )
    book_at(path, clock).add_key(key)
    secret = text.split("_", 2)[2]
    assert secret not in path.read_text()
    assert text not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = verifier(path, clock).verify(header(text))
    assert (found.sub, found.scopes) == ("ci", {"read", "write"})
    assert (found.streams, found.dbs, found.actor_id) == (("builds/",), ("app",), "ci/1")
    assert json.loads(found.claims)["jti"] == found.token_id == f"trk_{key.id}"
    assert "hash" not in key.to_public()


def test_a_key_that_is_not_quite_the_key(path: Path, clock: FakeClock) -> None:
    key, text = create_api_key(sub="ci", scopes=["read"], clock=clock)
    book_at(path, clock).add_key(key)
    check = verifier(path, clock)
    for wrong in (
        text[:-1],
        text + "x",
        text[:-1] + ("a" if text[-1] != "a" else "b"),
        f"trk_{key.id}",
        f"trk_{key.id}_",
        f"trk_{key.id}_{key.hash}",
        "trk_",
        "trk__",
        text.replace(key.id, "0" * 16),
    ):
        assert reason(check, wrong) == "unknown API key"
    assert check.verify(header(text)).sub == "ci"


@pytest.mark.parametrize(
    "wrong",
    [
        {"scopes": []},
        {"scopes": ["system"]},
        {"scopes": ["admin"]},
        {"sub": ""},
        {"sub": "x" * 2000},
        {"streams": [""]},
        {"streams": ["a/"] * 101},
        {"lifetime_s": 0},
        {"lifetime_s": 10**13},
    ],
)
def test_keys_that_nobody_can_have(wrong: dict[str, Any]) -> None:
    with pytest.raises(TailraceError) as caught:
        create_api_key(**{"sub": "ci", "scopes": ["read"], **wrong})
    assert caught.value.code == "invalid_request"


def test_keys_expire_and_make_room(path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.auth.identities.API_KEYS_MAX", 1)
    book = book_at(path, clock)
    key, text = create_api_key(sub="ci", scopes=["read"], lifetime_s=60, clock=clock)
    book.add_key(key)
    check = verifier(path, clock)
    assert check.verify(header(text))
    other, _ = create_api_key(sub="other", scopes=["read"], clock=clock)
    with pytest.raises(TailraceError) as caught:
        book.add_key(other)
    assert caught.value.code == "insufficient_storage"
    clock.advance(100)
    assert reason(check, text) == "the token has expired"
    assert reason(check, text) == "the API key has expired"
    book.add_key(other)
    assert [one.sub for one in book.read_records().keys] == ["other"]


def test_a_revoked_key_is_refused_as_soon_as_the_file_is_read(path: Path, clock: FakeClock) -> None:
    book = book_at(path, clock)
    key, text = create_api_key(sub="ci", scopes=["read"], clock=clock)
    book.add_key(key)
    check = verifier(path, clock)
    identity = check.verify(header(text))
    assert not check.poll_changes()
    book.remove_key(key.id)
    assert check.poll_changes()
    assert not check.is_valid(identity)
    assert reason(check, text) == "unknown API key"
    assert not check.poll_changes()
    with pytest.raises(TailraceError) as caught:
        book.remove_key(key.id)
    assert caught.value.code == "not_found"


def test_a_key_that_is_changed_by_hand_is_another(path: Path, clock: FakeClock) -> None:
    key, text = create_api_key(sub="ci", scopes=["read", "write"], clock=clock)
    book_at(path, clock).add_key(key)
    check = verifier(path, clock)
    identity = check.verify(header(text))
    register = json.loads(path.read_text())
    register["keys"][0]["scopes"] = ["read"]
    path.write_text(json.dumps(register))
    assert check.poll_changes()
    assert not check.is_valid(identity), "what was opened with more ends"
    assert check.verify(header(text)).scopes == {"read"}


def test_tokens_are_revoked_by_id_and_by_subject(path: Path, clock: FakeClock) -> None:
    check, book = verifier(path, clock), book_at(path, clock)
    one, two, other = (
        create_token(SECRET, sub=sub, scopes=["read"], clock=clock) for sub in ("ada", "ada", "bob")
    )
    identities = [check.verify(header(token)) for token in (one, two, other)]
    assert len({identity.token_id for identity in identities}) == 3
    book.revoke_token(identities[0].token_id, int(identities[0].expires_at or 0))
    assert check.poll_changes()
    assert [check.is_valid(identity) for identity in identities] == [False, True, True]
    assert reason(check, one) == "the token was revoked"
    assert check.verify(header(two))
    book.revoke_subject("ada")
    assert check.poll_changes()
    assert [check.is_valid(identity) for identity in identities] == [False, False, True]
    clock.advance(1)
    again = create_token(SECRET, sub="ada", scopes=["read"], clock=clock)
    assert check.verify(header(again)).sub == "ada", "what was issued later is good"


def test_what_does_not_say_when_it_was_issued_is_revoked_with_its_subject() -> None:
    found = revocations.Revocations(subjects=[revocations.RevokedSubject("ada", 1000)])
    assert found.includes(Identity("ada", frozenset()))
    assert found.includes(Identity("ada", frozenset(), issued_at=1000))
    assert found.includes(Identity("ada", frozenset(), issued_at=1000.9)), (
        "in the same second, perhaps before"
    )
    assert not found.includes(Identity("ada", frozenset(), issued_at=1001))
    assert not found.includes(Identity("", frozenset()))


def test_what_a_token_was_exchanged_for_is_revoked_with_it() -> None:
    found = revocations.Revocations([revocations.RevokedToken("first", 1000)])
    assert found.includes(Identity("ada", frozenset(), token_id="second", origin_id="first"))
    assert not found.includes(Identity("ada", frozenset(), token_id="second", origin_id="other"))


@pytest.mark.parametrize("end", ["taken out", "changed", "expired"])
def test_what_a_key_was_exchanged_for_ends_with_the_key(path: Path, clock: FakeClock, end: str) -> None:
    """Also if nobody revokes anything: whoever refreshes in time would go on for ever."""
    key, text = create_api_key(sub="ci", scopes=["read"], lifetime_s=3600, clock=clock)
    book_at(path, clock).add_key(key)
    check = verifier(path, clock)
    holder = check.verify(header(text))
    claims = {"sub": "ci", "scope": "read", "trOrigin": holder.token_id, "trVouched": holder.credential}
    exchanged = jwt.encode(claims, SECRET, algorithm="HS256")
    assert check.verify(header(exchanged)).sub == "ci"
    if end == "expired":
        clock.advance(3600 + 31)
    else:
        kept = json.loads(path.read_text())
        kept["keys"] = [] if end == "taken out" else [{**kept["keys"][0], "sub": "other"}]
        path.write_text(json.dumps(kept))
    check.poll_changes()
    again = jwt.encode({**claims, "jti": "again"}, SECRET, algorithm="HS256")
    assert reason(check, again) == "the token was revoked"


def test_revocations_are_forgotten_when_their_tokens_have_expired() -> None:
    known = revocations.add_revoked_token((), "a", 1000, 1010)
    assert known[0].until is not None
    assert known[0].until >= 1000 + revocations.EXCHANGED_TOKEN_S_MAX, (
        "the hub may have made a newer one of it"
    )
    known = revocations.add_revoked_token(known, "b", 1000, None)
    later = revocations.add_revoked_token(known, "c", 10**6, None)
    assert [one.jti for one in later] == ["b", "c"]
    assert [one.at for one in revocations.add_revoked_token(later, "b", 10**6 + 1, None)] == [
        10**6,
        10**6 + 1,
    ]


def test_revocations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocations, "REVOKED_MAX", 2)
    known = revocations.add_revoked_token(revocations.add_revoked_token((), "a", 1, None), "b", 1, None)
    with pytest.raises(TailraceError) as caught:
        revocations.add_revoked_token(known, "c", 1, None)
    assert caught.value.code == "insufficient_storage"
    assert len(revocations.add_revoked_token(known, "b", 2, None)) == 2
    subjects = revocations.add_revoked_subject(revocations.add_revoked_subject((), "a", 1), "b", 1)
    with pytest.raises(TailraceError):
        revocations.add_revoked_subject(subjects, "c", 1)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"version":2}',
        '{"keys":[{}]}',
        '{"more":1}',
        '{"keys":[{"id":"x","hash":"y","sub":"a","scopes":[],"createdAt":1}]}',
        '{"tokens":[{"jti":"","at":1}]}',
    ],
)
def test_a_file_that_cannot_be_used(path: Path, clock: FakeClock, content: str) -> None:
    """At start it stops the server; later what was known stays in force, above all what was revoked."""
    book = book_at(path, clock)
    book.revoke_subject("ada")
    check = verifier(path, clock)
    token = create_token(SECRET, sub="ada", scopes=["read"], clock=clock)
    assert reason(check, token) == "the token was revoked"
    path.write_text(content)
    assert not check.poll_changes()
    assert reason(check, token) == "the token was revoked"
    with pytest.raises(TailraceError, match="identity file"):
        verifier(path, clock)
    with pytest.raises(TailraceError, match="cannot change"):
        book.revoke_subject("bob")
    path.unlink()
    assert not check.poll_changes()
    assert reason(check, token) == "the token was revoked"
    with pytest.raises(TailraceError, match="is missing"):
        check.book.revoke_subject("bob")
    book.revoke_subject("bob")
    assert check.poll_changes()
    assert check.verify(header(token)).sub == "ada", "a new file counts as it is"


def test_a_file_that_is_too_large(path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_file, "IDENTITY_FILE_BYTES_MAX", 100)
    with pytest.raises(TailraceError, match="larger than 100 bytes"):
        book_at(path, clock).revoke_subject("a" * 200)
    assert not path.exists()
    path.write_text(" " * 101)
    with pytest.raises(TailraceError, match="larger than 100 bytes"):
        verifier(path, clock)


def test_a_file_without_which_nobody_gets_in_has_to_be_there(path: Path, clock: FakeClock) -> None:
    with pytest.raises(TailraceError, match="tailrace key create"):
        verifier(path, clock, auth_jwt_secret="", auth_keys_file=str(path))
    key, text = create_api_key(sub="admin", scopes=["manage"], clock=clock)
    book_at(path, clock).add_key(key)
    check = verifier(path, clock, auth_jwt_secret="", auth_keys_file=str(path))
    assert check.enabled
    assert check.verify(header(text)).scopes == {"manage"}
    path.unlink()
    assert verifier(path, clock, auth_keys_file=str(path)).enabled, "tokens are another way in"


def test_a_change_keeps_the_mode_of_the_file(path: Path, clock: FakeClock) -> None:
    book = book_at(path, clock)
    book.revoke_subject("first")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    book.revoke_subject("ada")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_change_by_another_user_keeps_the_owner(
    path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root would make it: the files are root's until they are given to whom the old one belonged to."""
    book = book_at(path, clock)
    book.revoke_subject("first")
    found, given = path.stat(), []
    real, opened = os.fstat, os.stat_result((*found[:4], found.st_uid + 1, found.st_gid + 1, *found[6:]))
    monkeypatch.setattr(identity_file.os, "fstat", lambda fd: opened)
    monkeypatch.setattr(identity_file.os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        identity_file.os,
        "fchown",
        lambda fd, uid, gid: given.append((Path(f"/proc/self/fd/{fd}").readlink().name, uid, gid)),
    )
    book.revoke_subject("ada")
    monkeypatch.setattr(identity_file.os, "fstat", real)
    owner = (found.st_uid, found.st_gid)
    assert given == [(f"{path.name}.lock", *owner), (f"{path.name}.tmp", *owner)]


def test_a_change_that_would_take_the_file_from_its_owner_is_refused(
    path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = book_at(path, clock)
    book.revoke_subject("first")
    before, found = path.read_bytes(), path.stat()

    def refuse(fd: int, uid: int, gid: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    other = os.stat_result((*found[:4], found.st_uid + 1, found.st_gid + 1, *found[6:]))
    monkeypatch.setattr(identity_file.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(identity_file.os, "fstat", lambda fd: other)
    monkeypatch.setattr(identity_file.os, "fchown", refuse)
    with pytest.raises(TailraceError, match="run this command as that user"):
        book.revoke_subject("ada")
    assert path.read_bytes() == before
    assert not path.with_name(path.name + ".tmp").exists()


def test_writers_wait_for_each_other(path: Path, clock: FakeClock) -> None:
    def write(number: int) -> None:
        book_at(path, clock).revoke_subject(f"s{number}")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.sub for one in book_at(path, clock).read_records().subjects} == {f"s{n}" for n in range(12)}


def test_two_keys_of_one_id_are_a_mistake(path: Path, clock: FakeClock) -> None:
    key, _ = create_api_key(sub="a", scopes=["read"], clock=clock)
    book_at(path, clock).add_key(key)
    register = json.loads(path.read_text())
    register["keys"] *= 2
    path.write_text(json.dumps(register))
    with pytest.raises(TailraceError, match="duplicate key id"):
        verifier(path, clock)


# -- grants


def test_a_grant_ends_with_its_time_and_with_its_giver(path: Path, clock: FakeClock) -> None:
    check, book = verifier(path, clock), book_at(path, clock)
    giver = check.verify(header(create_token(SECRET, sub="m", scopes=["manage"], lifetime_s=60, clock=clock)))
    job = Identity(sub="job", scopes=frozenset({"system"}))
    given = check.grants.issue(job, 3600, giver)
    own = check.grants.issue(job, 3600)
    identity = check.verify(header(given))
    assert identity.expires_at == giver.expires_at, "no longer than what it was asked for with"
    book.revoke_token(giver.token_id, None)
    assert check.poll_changes()
    assert not check.is_valid(identity)
    assert "revoked" in reason(check, given)
    assert check.is_valid(check.verify(header(own)))
    book.revoke_subject("job")
    assert check.poll_changes()
    assert check.is_valid(check.verify(header(own))), "the server's own are not revoked by a name"
    clock.advance(3700)
    assert "expired" in reason(check, own)


def test_grants_are_bounded(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.auth.tokens.GRANTS_MAX", 2)
    grants = GrantStore(clock)
    job = Identity(sub="job", scopes=frozenset({"system"}))
    tokens = [grants.issue(job, 10).encode() for _ in range(3)]
    assert [grants.find(token) is not None for token in tokens] == [False, True, True]
    clock.advance(41)
    assert grants.find(tokens[2]) is None


def test_the_prefix_tells_a_key() -> None:
    assert api_keys.is_api_key(b"trk_0")
    assert not api_keys.is_api_key(b"eyJhbGciOiJIUzI1NiJ9.e30.x")
