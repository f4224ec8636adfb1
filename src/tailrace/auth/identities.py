"""The identity file (API keys, revoked tokens and subjects) and its copy in memory.

Tokens that are good no more: one by its id, or all that a subject was given so far.

The file that says which API keys there are and which tokens are good no more.

It is a file of its own, and not a part of the log: the first key has to be there before the first server,
and every process that checks tokens (workers, edges) reads the same one. Whoever changes it holds a lock
beside it and puts a whole new file in its place: readers see it before or after and never in between.

What the identity file says, held in memory and looked at again when the file is another.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Annotated, Final

import msgspec

from tailrace.auth.api_keys import API_KEY_PREFIX, API_KEYS_MAX, ApiKey
from tailrace.auth.tokens import LEEWAY_S, TIME_S_MAX, Identity
from tailrace.common.clock import SYSTEM_CLOCK, Clock
from tailrace.common.errors import TailraceError

REVOKED_MAX: Final = 50_000
REVOCATION_HASH_DIGITS: Final = 32
# A token may have been exchanged for a newer one at the hub, which is good for at most so long.
EXCHANGED_TOKEN_S_MAX: Final = 3600

Seconds = Annotated[int, msgspec.Meta(ge=0, le=int(TIME_S_MAX))]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class RevokedToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """By `jti`. After `until` the token has expired anyway, and need not be remembered."""

    jti: Text
    at: Seconds
    until: Seconds | None = None


class RevokedSubject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that was issued to a subject up to `at`, and everything that does not say when it was."""

    sub: Text
    at: Seconds


class RevokedHashes(msgspec.Struct, frozen=True):
    """The same for whoever checks tokens elsewhere: hashes, which name nobody and prove nothing."""

    tokens: frozenset[str] = frozenset()
    subjects: Mapping[str, Seconds] = msgspec.field(default_factory=dict[str, int])

    def concern(self, identity: Identity) -> bool:
        ids = (identity.token_id, identity.origin_id)
        if any(revocation_hash(one) in self.tokens for one in ids if one):
            return True
        return _issued_before_revocation(identity, self.subjects.get(revocation_hash(identity.sub)))


class Revocations:
    """All of them, ready to ask."""

    def __init__(self, tokens: Iterable[RevokedToken] = (), subjects: Iterable[RevokedSubject] = ()) -> None:
        self._tokens = frozenset(one.jti for one in tokens)
        self._subjects = {one.sub: one.at for one in subjects}

    def __len__(self) -> int:
        return len(self._tokens) + len(self._subjects)

    def concern(self, identity: Identity) -> bool:
        if identity.token_id in self._tokens or identity.origin_id in self._tokens:
            return True
        return _issued_before_revocation(identity, self._subjects.get(identity.sub))

    def marks(self) -> RevokedHashes:
        subjects = {revocation_hash(sub): at for sub, at in self._subjects.items()}
        return RevokedHashes(frozenset(map(revocation_hash, self._tokens)), subjects)


def revocation_hash(text: str) -> str:
    """What stands for the id of a token, or for a subject."""
    return hashlib.sha256(text.encode()).hexdigest()[:REVOCATION_HASH_DIGITS]


def _issued_before_revocation(identity: Identity, at: int | None) -> bool:
    """Whether a token was there when its subject lost everything; if it does not say, it counts as that."""
    return at is not None and (identity.issued_at is None or identity.issued_at < at + 1)


def add_revoked_token(
    known: tuple[RevokedToken, ...], jti: str, now_s: int, expires_s: int | None
) -> tuple[RevokedToken, ...]:
    """With one more; those that have expired by themselves are left out."""
    until = None if expires_s is None else max(expires_s, now_s + EXCHANGED_TOKEN_S_MAX) + 2 * int(LEEWAY_S)
    kept = [one for one in known if one.jti != jti and (one.until is None or one.until > now_s)]
    _check_room(len(kept))
    return (*kept, RevokedToken(jti, now_s, until))


def add_revoked_subject(
    known: tuple[RevokedSubject, ...], sub: str, now_s: int
) -> tuple[RevokedSubject, ...]:
    kept = [one for one in known if one.sub != sub]
    _check_room(len(kept))
    return (*kept, RevokedSubject(sub, now_s))


def _check_room(count: int) -> None:
    if count >= REVOKED_MAX:
        raise TailraceError(
            "insufficient_storage",
            f"{REVOKED_MAX} revocations are remembered already; change the secret they were signed with",
        )


IDENTITY_FILE_NAME: Final = "identity.json"
IDENTITY_FILE_BYTES_MAX: Final = 32 * 1024 * 1024

FileStamp = tuple[int, int, int]


class IdentityRecords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole content."""

    version: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    keys: Annotated[tuple[ApiKey, ...], msgspec.Meta(max_length=API_KEYS_MAX)] = ()
    tokens: Annotated[tuple[RevokedToken, ...], msgspec.Meta(max_length=REVOKED_MAX)] = ()
    subjects: Annotated[tuple[RevokedSubject, ...], msgspec.Meta(max_length=REVOKED_MAX)] = ()


_decode_records = msgspec.json.Decoder(IdentityRecords).decode


class IdentityFile:
    """One path; nothing is remembered between two calls."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def stamp(self) -> FileStamp | None:
        """Another one after every change; None while there is no file."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read(self) -> IdentityRecords:
        """What the file says; nothing if there is none. OSError or ValueError if it cannot be used."""
        try:
            with self.path.open("rb") as opened:
                content = opened.read(IDENTITY_FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return IdentityRecords()
        if len(content) > IDENTITY_FILE_BYTES_MAX:
            raise ValueError(f"larger than {IDENTITY_FILE_BYTES_MAX} bytes")
        try:
            found = _decode_records(content)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from None
        if len({key.id for key in found.keys}) < len(found.keys):
            raise ValueError("two keys have the same id")
        return found

    def change(self, edit: Callable[[IdentityRecords], IdentityRecords]) -> IdentityRecords:
        """One change by one writer at a time, on disk when this returns. Blocks: not for the event loop."""
        try:
            with self._locked():
                changed = edit(self.read())
                self._replace(msgspec.json.format(msgspec.json.encode(changed), indent=1) + b"\n")
        except (OSError, ValueError) as error:
            raise TailraceError("unavailable", f"{self.path} cannot be changed: {error}") from None
        return changed

    @contextmanager
    def _locked(self) -> Generator[None]:
        lock = self.path.with_name(self.path.name + ".lock")
        made = not lock.exists()
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if made or os.geteuid() == 0:
                self._keep_owner(fd, least=0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _replace(self, content: bytes) -> None:
        if len(content) > IDENTITY_FILE_BYTES_MAX:
            raise ValueError(f"it would be larger than {IDENTITY_FILE_BYTES_MAX} bytes")
        temporary = self.path.with_name(self.path.name + ".tmp")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as opened:
                self._keep_owner(fd)
                opened.write(content)
                opened.flush()
                os.fsync(fd)
            temporary.rename(self.path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _keep_owner(self, fd: int, least: int = 0) -> None:
        """Whoever could read the file before can read the new one: no command of root locks a server out.

        A first file that root makes belongs to whom its directory belongs to.
        """
        try:
            found = self.path.stat()
            mode = stat.S_IMODE(found.st_mode)
        except FileNotFoundError:
            if os.geteuid() != 0:
                return
            found, mode = self.path.parent.stat(), 0o600
        own = os.fstat(fd)
        if (own.st_uid, own.st_gid) != (found.st_uid, found.st_gid):
            try:
                os.fchown(fd, found.st_uid, found.st_gid)
            except PermissionError:
                raise PermissionError(
                    f"it belongs to user {found.st_uid} and group {found.st_gid}, and would no more; "
                    "run this as that user, or as root"
                ) from None
        os.fchmod(fd, mode | least)


logger = logging.getLogger("tailrace.auth")

_NEVER_READ: Final[FileStamp] = (-1, -1, -1)


class IdentityStore:
    """Asking is the event loop's; changing blocks and is for a thread, or for a command."""

    def __init__(self, file: IdentityFile, clock: Clock = SYSTEM_CLOCK) -> None:
        self._file = file
        self._clock = clock
        self._stamp: FileStamp | None = _NEVER_READ
        self._keys: dict[str, ApiKey] = {}
        self._ends_s: dict[str, float] = {}  # of each key, by its mark
        self.revocations = Revocations()
        self._followed: dict[str, RevokedHashes] = {}
        self.version = 0

    # -- asking ----------------------------------------------------------------------------------------

    @property
    def keys(self) -> list[ApiKey]:
        return list(self._keys.values())

    def find(self, key_id: str) -> ApiKey | None:
        return self._keys.get(key_id)

    def has(self, mark: str) -> bool:
        """Whether the key with this mark is there and good, with nothing about it changed."""
        ends_s = self._ends_s.get(mark)
        return ends_s is not None and self._now_s() < ends_s + LEEWAY_S

    def revoked(self, identity: Identity) -> bool:
        """Whether the file, or somebody who is followed, says that this one is good no more."""
        if self.revocations.concern(identity):
            return True
        return any(marks.concern(identity) for marks in self._followed.values())

    def follow(self, source: str, marks: RevokedHashes) -> bool:
        """Takes over what another server has revoked; True if that is something else than before."""
        if self._followed.get(source) == marks:
            return False
        self._followed[source] = marks
        self.version += 1
        return True

    # -- reading ---------------------------------------------------------------------------------------

    def load(self, *, required: bool) -> None:
        """At start: the file has to be right, and to be there if nobody could get in without it."""
        if required and self._file.stamp() is None:
            raise TailraceError(
                "invalid_request",
                f"there are no API keys at {self._file.path}; make the first one with: "
                f"tailrace key create --file {self._file.path} --sub admin --scope manage",
            )
        try:
            self._look()
        except (OSError, ValueError) as error:
            raise TailraceError("invalid_request", f"identities {self._file.path}: {error}") from None

    def refresh(self) -> bool:
        """Looks at the file again if it is another; True if what it says is in force now.

        A file that cannot be used, or is gone, changes nothing: it must not bring back what was revoked.
        """
        stamp = self._file.stamp()
        if stamp == self._stamp:
            return False
        if stamp is None:
            self._stamp = None
            logger.error("identities %s: the file is gone; what it said stays in force", self._file.path)
            return False
        try:
            self._look()
        except (OSError, ValueError) as error:
            self._stamp = stamp  # said once
            logger.error("identities %s: %s; what was known stays in force", self._file.path, error)
            return False
        return True

    def _look(self) -> None:
        stamp = self._file.stamp()  # before reading: what changes meanwhile is seen the next time
        self._adopt(self._file.read())
        self._stamp = stamp

    def _adopt(self, register: IdentityRecords) -> None:
        self._keys = {key.id: key for key in register.keys}
        self._ends_s = {key.mark: inf if key.expires_at is None else key.expires_at for key in register.keys}
        self.revocations = Revocations(register.tokens, register.subjects)
        self.version += 1

    # -- changing --------------------------------------------------------------------------------------

    def listed(self) -> IdentityRecords:
        """What is on disk now."""
        try:
            return self._file.read()
        except (OSError, ValueError) as error:
            raise TailraceError("unavailable", f"identities {self._file.path}: {error}") from None

    def add_key(self, key: ApiKey) -> None:
        def edit(register: IdentityRecords) -> IdentityRecords:
            now_s = self._now_s()
            kept = [one for one in register.keys if one.expires_at is None or one.expires_at > now_s]
            if len(kept) >= API_KEYS_MAX:
                raise TailraceError("insufficient_storage", f"there are {API_KEYS_MAX} keys already")
            return _replace_fields(register, keys=(*kept, key))

        self._change(edit)

    def remove_key(self, key_id: str) -> None:
        def edit(register: IdentityRecords) -> IdentityRecords:
            kept = tuple(key for key in register.keys if key.id != key_id)
            if len(kept) == len(register.keys):
                raise TailraceError("not_found", "there is no such key")
            # Also what it was exchanged for is good no more.
            now_s = self._now_s()
            return _replace_fields(
                register,
                keys=kept,
                tokens=add_revoked_token(register.tokens, API_KEY_PREFIX + key_id, now_s, now_s),
            )

        self._change(edit)

    def revoke_token(self, jti: str, expires_s: int | None) -> None:
        self._change(
            lambda register: _replace_fields(
                register, tokens=add_revoked_token(register.tokens, jti, self._now_s(), expires_s)
            )
        )

    def revoke_subject(self, sub: str) -> None:
        self._change(
            lambda register: _replace_fields(
                register, subjects=add_revoked_subject(register.subjects, sub, self._now_s())
            )
        )

    def _change(self, edit: Callable[[IdentityRecords], IdentityRecords]) -> None:
        if (self._keys or self.revocations) and self._file.stamp() is None:
            # A new one with this change alone would bring back what the old one had revoked.
            raise TailraceError("unavailable", f"{self._file.path} is gone: put it back")
        self._file.change(edit)

    def _now_s(self) -> int:
        return self._clock.now_ns() // 1_000_000_000


def _replace_fields(register: IdentityRecords, **changes: object) -> IdentityRecords:
    return msgspec.structs.replace(register, **changes)
