"""The identity file (API keys, revoked tokens and subjects) and its copy in memory.

The file is separate from the log: the first key must exist before the first server, and every process that
verifies tokens (workers, edges) reads the same file. A writer holds a lock file and replaces the whole file,
so that readers see either the old or the new content. Readers reload it when its inode, time or size changes.
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
from tailrace.common.logging_setup import log_fields
from tailrace.common.private_files import replace_file

REVOKED_MAX: Final = 50_000
REVOCATION_HASH_DIGITS: Final = 32
# A token may have been exchanged at the hub for a newer one, which is valid for at most this long.
EXCHANGED_TOKEN_S_MAX: Final = 3600

Seconds = Annotated[int, msgspec.Meta(ge=0, le=int(TIME_S_MAX))]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class RevokedToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token revoked by `jti`. After `until` it has expired anyway and the record can be dropped."""

    jti: Text
    at: Seconds
    until: Seconds | None = None


class RevokedSubject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Revokes all tokens issued to a subject up to `at`, and those without an issue time."""

    sub: Text
    at: Seconds


class RevokedHashes(msgspec.Struct, frozen=True):
    """Revocations as hashes, for other processes that verify tokens (edges): they reveal no identity."""

    tokens: frozenset[str] = frozenset()
    subjects: Mapping[str, Seconds] = msgspec.field(default_factory=dict[str, int])

    def includes(self, identity: Identity) -> bool:
        ids = (identity.token_id, identity.origin_id)
        if any(revocation_hash(one) in self.tokens for one in ids if one):
            return True
        return _issued_before_revocation(identity, self.subjects.get(revocation_hash(identity.sub)))


class Revocations:
    """All revocations, indexed for lookups."""

    def __init__(self, tokens: Iterable[RevokedToken] = (), subjects: Iterable[RevokedSubject] = ()) -> None:
        self._tokens = frozenset(one.jti for one in tokens)
        self._subjects = {one.sub: one.at for one in subjects}

    def __len__(self) -> int:
        return len(self._tokens) + len(self._subjects)

    def includes(self, identity: Identity) -> bool:
        if identity.token_id in self._tokens or identity.origin_id in self._tokens:
            return True
        return _issued_before_revocation(identity, self._subjects.get(identity.sub))

    def hashes(self) -> RevokedHashes:
        subjects = {revocation_hash(sub): at for sub, at in self._subjects.items()}
        return RevokedHashes(frozenset(map(revocation_hash, self._tokens)), subjects)


def revocation_hash(text: str) -> str:
    """The hash of a token id or a subject."""
    return hashlib.sha256(text.encode()).hexdigest()[:REVOCATION_HASH_DIGITS]


def _issued_before_revocation(identity: Identity, at: int | None) -> bool:
    """Whether a token predates the revocation of its subject; one without an issue time counts as older."""
    return at is not None and (identity.issued_at is None or identity.issued_at < at + 1)


def add_revoked_token(
    known: tuple[RevokedToken, ...], jti: str, now_s: int, expires_s: int | None
) -> tuple[RevokedToken, ...]:
    """Add a revoked token, and drop those that have expired."""
    until = None if expires_s is None else max(expires_s, now_s + EXCHANGED_TOKEN_S_MAX) + 2 * int(LEEWAY_S)
    remaining = [one for one in known if one.jti != jti and (one.until is None or one.until > now_s)]
    _check_count(len(remaining))
    return (*remaining, RevokedToken(jti, now_s, until))


def add_revoked_subject(
    known: tuple[RevokedSubject, ...], sub: str, now_s: int
) -> tuple[RevokedSubject, ...]:
    remaining = [one for one in known if one.sub != sub]
    _check_count(len(remaining))
    return (*remaining, RevokedSubject(sub, now_s))


def _check_count(count: int) -> None:
    if count >= REVOKED_MAX:
        raise TailraceError(
            "insufficient_storage",
            f"limit of {REVOKED_MAX} revocations reached; change the secret that signs the tokens",
        )


IDENTITY_FILE_NAME: Final = "identity.json"
IDENTITY_FILE_BYTES_MAX: Final = 32 * 1024 * 1024

FileStamp = tuple[int, int, int]


class IdentityRecords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the identity file."""

    version: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    keys: Annotated[tuple[ApiKey, ...], msgspec.Meta(max_length=API_KEYS_MAX)] = ()
    tokens: Annotated[tuple[RevokedToken, ...], msgspec.Meta(max_length=REVOKED_MAX)] = ()
    subjects: Annotated[tuple[RevokedSubject, ...], msgspec.Meta(max_length=REVOKED_MAX)] = ()


_decode_records = msgspec.json.Decoder(IdentityRecords).decode


class IdentityFile:
    """The identity file on disk; has no state of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def stamp(self) -> FileStamp | None:
        """Changes after every write; None if the file does not exist."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read(self) -> IdentityRecords:
        """The content, empty if the file does not exist. Raises OSError or ValueError if it is invalid."""
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
            raise ValueError("duplicate key id")
        return found

    def change(self, edit: Callable[[IdentityRecords], IdentityRecords]) -> IdentityRecords:
        """Apply a change under the lock; it is on disk when this returns. Blocks: not for the event loop."""
        try:
            with self._locked():
                changed = edit(self.read())
                self._replace(msgspec.json.format(msgspec.json.encode(changed), indent=1) + b"\n")
        except (OSError, ValueError) as error:
            raise TailraceError("unavailable", f"cannot change {self.path}: {error}") from None
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
            raise ValueError(f"larger than {IDENTITY_FILE_BYTES_MAX} bytes")
        replace_file(self.path, content, prepare=self._keep_owner)

    def _keep_owner(self, fd: int, least: int = 0) -> None:
        """Give the new file the owner and mode of the old one: a command run as root locks out no server.

        A first file created by root gets the owner of its directory.
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
                    f"the file would lose its owner (user {found.st_uid}, group {found.st_gid}); "
                    "run this command as that user or as root"
                ) from None
        os.fchmod(fd, mode | least)


logger = logging.getLogger("tailrace.auth")

_NEVER_READ: Final[FileStamp] = (-1, -1, -1)


class IdentityStore:
    """The identity file in memory. Lookups run on the event loop; changes block, for threads and commands."""

    def __init__(self, file: IdentityFile, clock: Clock = SYSTEM_CLOCK) -> None:
        self._file = file
        self._clock = clock
        self._stamp: FileStamp | None = _NEVER_READ
        self._keys: dict[str, ApiKey] = {}
        self._ends_s: dict[str, float] = {}  # expiry of each key by its fingerprint
        self.revocations = Revocations()
        self._followed: dict[str, RevokedHashes] = {}
        self.version = 0

    # -- lookups ---------------------------------------------------------------------------------------

    @property
    def keys(self) -> list[ApiKey]:
        return list(self._keys.values())

    def find_key(self, key_id: str) -> ApiKey | None:
        return self._keys.get(key_id)

    def has_key(self, fingerprint: str) -> bool:
        """Whether the key with this fingerprint exists unchanged and has not expired."""
        ends_s = self._ends_s.get(fingerprint)
        return ends_s is not None and self._now_s() < ends_s + LEEWAY_S

    def is_revoked(self, identity: Identity) -> bool:
        """Whether the file, or a followed server, has revoked this identity."""
        if self.revocations.includes(identity):
            return True
        return any(hashes.includes(identity) for hashes in self._followed.values())

    def set_followed(self, source: str, hashes: RevokedHashes) -> bool:
        """Set the revocations of another server; True if they changed."""
        if self._followed.get(source) == hashes:
            return False
        self._followed[source] = hashes
        self.version += 1
        return True

    # -- reading ---------------------------------------------------------------------------------------

    def load(self, *, required: bool) -> None:
        """At start: the file must be valid, and must exist if it is the only way to authenticate."""
        if required and self._file.stamp() is None:
            raise TailraceError(
                "invalid_request",
                f"no API keys at {self._file.path}; create the first one with: "
                f"tailrace key create --file {self._file.path} --sub admin --scope manage",
            )
        try:
            self._reload()
        except (OSError, ValueError) as error:
            raise TailraceError("invalid_request", f"identity file {self._file.path}: {error}") from None

    def refresh(self) -> bool:
        """Reload the file if it has changed; True if the new content is in use.

        A missing or invalid file changes nothing: it must not undo a revocation.
        """
        stamp = self._file.stamp()
        if stamp == self._stamp:
            return False
        if stamp is None:
            self._stamp = None
            logger.error(
                "identity file missing, keeping the last loaded version",
                extra=log_fields(path=str(self._file.path)),
            )
            return False
        try:
            self._reload()
        except (OSError, ValueError) as error:
            self._stamp = stamp  # logged once
            logger.error(
                "identity file invalid, keeping the last loaded version",
                extra=log_fields(path=str(self._file.path), error=str(error)),
            )
            return False
        return True

    def _reload(self) -> None:
        stamp = self._file.stamp()  # before reading, so that a concurrent change is seen the next time
        self._apply(self._file.read())
        self._stamp = stamp

    def _apply(self, records: IdentityRecords) -> None:
        self._keys = {key.id: key for key in records.keys}
        self._ends_s = {
            key.fingerprint: inf if key.expires_at is None else key.expires_at for key in records.keys
        }
        self.revocations = Revocations(records.tokens, records.subjects)
        self.version += 1

    # -- changes ---------------------------------------------------------------------------------------

    def read_records(self) -> IdentityRecords:
        """The current content on disk."""
        try:
            return self._file.read()
        except (OSError, ValueError) as error:
            raise TailraceError("unavailable", f"identity file {self._file.path}: {error}") from None

    def add_key(self, key: ApiKey) -> None:
        def edit(records: IdentityRecords) -> IdentityRecords:
            now_s = self._now_s()
            remaining = [one for one in records.keys if one.expires_at is None or one.expires_at > now_s]
            if len(remaining) >= API_KEYS_MAX:
                raise TailraceError("insufficient_storage", f"limit of {API_KEYS_MAX} API keys reached")
            return _replace_fields(records, keys=(*remaining, key))

        self._change(edit)

    def remove_key(self, key_id: str) -> None:
        def edit(records: IdentityRecords) -> IdentityRecords:
            remaining = tuple(key for key in records.keys if key.id != key_id)
            if len(remaining) == len(records.keys):
                raise TailraceError("not_found", "API key not found")
            # Tokens that it was exchanged for are revoked too.
            now_s = self._now_s()
            return _replace_fields(
                records,
                keys=remaining,
                tokens=add_revoked_token(records.tokens, API_KEY_PREFIX + key_id, now_s, now_s),
            )

        self._change(edit)

    def revoke_token(self, jti: str, expires_s: int | None) -> None:
        self._change(
            lambda records: _replace_fields(
                records, tokens=add_revoked_token(records.tokens, jti, self._now_s(), expires_s)
            )
        )

    def revoke_subject(self, sub: str) -> None:
        self._change(
            lambda records: _replace_fields(
                records, subjects=add_revoked_subject(records.subjects, sub, self._now_s())
            )
        )

    def _change(self, edit: Callable[[IdentityRecords], IdentityRecords]) -> None:
        if (self._keys or self.revocations) and self._file.stamp() is None:
            # A new file with only this change would undo earlier revocations.
            raise TailraceError("unavailable", f"{self._file.path} is missing; restore it")
        self._file.change(edit)

    def _now_s(self) -> int:
        return self._clock.now_ns() // 1_000_000_000


def _replace_fields(records: IdentityRecords, **changes: object) -> IdentityRecords:
    return msgspec.structs.replace(records, **changes)
