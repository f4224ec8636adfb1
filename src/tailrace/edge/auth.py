"""Authentication at the edge: the tokens of clients, and the token of the edge itself.

Only clients whose token was verified here, or who have none, share cached slices and upstream sockets.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from tailrace.auth import Action, Identity, TokenVerifier, authorise, invalid_token_error, is_exchanged_token
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.settings import Settings
from tailrace.http.exchange import Exchange

logger = logging.getLogger("tailrace.edge")

TOKEN_BYTES_MAX = 16 * 1024

FileStamp = tuple[int, int, int]


class EdgeToken:
    """The edge's token from a file. While it is refused or expired, readers' tokens are used instead."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._stamp = self._file_stamp()
        self.value = self._read()  # as an Authorization header
        self._until_s: float | None = None  # wall time
        self._refused_by: set[str] = set()
        self._warned = False

    @property
    def is_refused(self) -> bool:
        return bool(self._refused_by)

    def usable(self, now_s: float) -> bytes | None:
        """The token, unless it is expired or refused."""
        if self._refused_by or (self._until_s is not None and now_s >= self._until_s):
            return None
        return self.value

    def refresh(self) -> bool:
        """Rereads a changed file; True if it has another token. An unreadable file changes nothing."""
        stamp = self._file_stamp()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            value = self._read()
        except TailraceError as error:
            logger.error(
                "cannot read the edge token, keeping the last one",
                extra=log_fields(path=str(self._path), error=error.message),
            )
            return False
        if value == self.value:
            return False
        self.value = value
        self._until_s = None
        self._refused_by.clear()
        self._warned = False
        logger.info("edge token reloaded", extra=log_fields(path=str(self._path)))
        return True

    def note_identity(self, identity: Identity) -> None:
        """Records the expiry, without leeway, so that the token is replaced in time."""
        self._until_s = identity.expires_at

    def note_answer(self, upstream_id: str, status: int) -> None:
        """Records the status of a request with the token. Only 401 concerns the token itself."""
        if status != 401:
            self._refused_by.discard(upstream_id)
            return
        self._refused_by.add(upstream_id)
        if not self._warned:
            self._warned = True
            logger.warning(
                "upstream refuses the edge token, using readers' tokens until the token file is replaced",
                extra=log_fields(upstream=upstream_id, path=str(self._path)),
            )

    def _file_stamp(self) -> FileStamp | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                token = file.read(TOKEN_BYTES_MAX).strip()
        except OSError as error:
            raise TailraceError(
                "invalid_request", f"cannot read the token file {self._path}: {error.strerror}"
            ) from None
        if not token:
            raise TailraceError("invalid_request", f"the token file {self._path} is empty")
        return b"Bearer " + token


ACTIONS = {
    b"GET": Action.READ_STREAM,
    b"HEAD": Action.READ_STREAM,
    b"POST": Action.WRITE_STREAM,
    b"PUT": Action.WRITE_STREAM,
    b"DELETE": Action.DELETE_STREAM,
}


class Caller(NamedTuple):
    """The client of a request."""

    shared: bool  # verified here: may share cached slices and sockets
    ip: str = ""
    authorization: bytes | None = None
    until_s: float | None = None  # wall time at which its permission ends
    identity: Identity | None = None
    via: bytes = b""  # the Via header of the request
    request_id: bytes = b""

    @classmethod
    def from_exchange(cls, exchange: Exchange, *, shared: bool = False) -> Caller:
        """An unverified client."""
        given = exchange.headers
        ip = exchange.peer.rpartition(":")[0]
        via, request_id = given.get(b"via", b""), exchange.request_id
        return cls(shared, ip, given.get(b"authorization"), via=via, request_id=request_id)


class Authenticator:
    """Checks tokens with the same keys and policy as the owner.

    Credentials that cannot be verified here are checked by the owner: such a client shares nothing.
    """

    def __init__(self, settings: Settings) -> None:
        self.verifier = TokenVerifier(settings) if settings.auth_configured else None

    @property
    def verifies(self) -> bool:
        return self.verifier is not None

    def admit(self, exchange: Exchange, name: str) -> Caller:
        """Authorises a request on a stream, before any lookup or forwarding."""
        caller = Caller.from_exchange(exchange, shared=b"authorization" not in exchange.headers)
        if self.verifier is None:
            return caller
        identity = self._identify(self.verifier, caller.authorization)
        if identity is None:
            return caller._replace(shared=False)
        action = ACTIONS.get(exchange.method)
        if action is not None:
            authorise(identity, action, stream=name)
        return caller._replace(shared=True, until_s=identity.until_s, identity=identity)

    def identify(self, exchange: Exchange) -> Caller:
        """Refuses an invalid token. The owner authorises the action.

        A missing token is accepted: some routes are public, others authenticate over the socket.
        """
        caller = Caller.from_exchange(exchange)
        if self.verifier is None or caller.authorization is None:
            return caller
        return caller._replace(identity=self._identify(self.verifier, caller.authorization))

    def inspect(self, exchange: Exchange) -> None:
        """Authorises access to the metrics of the edge."""
        if self.verifier is not None:
            identity = self.verifier.verify(exchange.headers.get(b"authorization"))
            authorise(identity, Action.INSPECT_SERVER)

    def _identify(self, verifier: TokenVerifier, authorization: bytes | None) -> Identity | None:
        try:
            return verifier.verify(authorization)
        except TailraceError as refusal:
            if refusal.code == "unauthorized" and authorization is not None and is_opaque(authorization):
                return None
            raise

    def read_expiry(self, token: EdgeToken) -> None:
        """Reads the expiry of the edge's own token, if it can be verified here."""
        try:
            if self.verifier is not None:
                token.note_identity(self.verifier.verify(token.value))
        except TailraceError:
            return

    def reload(self) -> None:
        """Reloads the keys."""
        if self.verifier is not None:
            self.verifier.reload()

    def changed(self) -> bool:
        """Whether keys or revocations changed since the last call."""
        return self.verifier is not None and self.verifier.poll_changes()

    def is_valid(self, caller: Caller) -> bool:
        """Whether the client's token is still valid."""
        if self.verifier is None or caller.identity is None:
            return True
        return self.verifier.is_valid(caller.identity)

    def check_still(self, caller: Caller, now_s: float) -> None:
        """Raises if the client's token expired or was revoked while it waited."""
        if caller.until_s is not None and now_s >= caller.until_s:
            raise invalid_token_error("the token has expired")
        if not self.is_valid(caller):
            raise invalid_token_error("the token was revoked")

    def start(self) -> None:
        if self.verifier is not None:
            self.verifier.start()

    def close(self) -> None:
        if self.verifier is not None:
            self.verifier.close()


def is_opaque(authorization: bytes) -> bool:
    """Whether only the owner can verify it: not a JWT, or one that was exchanged for an API key."""
    return authorization.count(b".") != 2 or is_exchanged_token(authorization)
