"""What the identity file says, held in memory and looked at again when the file is another."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from typing import Final

import msgspec

from tailrace.auth.api_keys import API_KEY_PREFIX, API_KEYS_MAX, ApiKey
from tailrace.auth.identity_file import FileStamp, IdentityFile, IdentityRecords
from tailrace.auth.revocations import Revocations, RevokedHashes, add_revoked_subject, add_revoked_token
from tailrace.auth.tokens import LEEWAY_S, Identity
from tailrace.common.clock import SYSTEM_CLOCK, Clock
from tailrace.common.errors import TailraceError

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
