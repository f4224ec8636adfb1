"""Authentication at the edge: the tokens of clients, and the token of the edge itself.

The edge's own token: read again when its file is another, and set aside while it is good for nothing.

Who is asking, and whether the edge can vouch for it: only then may answers be shared.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from tailrace.auth import Action, Identity, TokenVerifier, authorise, invalid_token_error, is_exchanged_token
from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings
from tailrace.http.exchange import Exchange

logger = logging.getLogger("tailrace.edge")

TOKEN_BYTES_MAX = 16 * 1024

FileStamp = tuple[int, int, int]


class EdgeToken:
    """One file. While its token is refused or over, the tokens of readers have to do."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._stamp = self._look()
        self.value = self._read()  # as an Authorization header
        self._until_s: float | None = None  # wall time
        self._refused_by: set[str] = set()
        self._told = False

    @property
    def is_refused(self) -> bool:
        return bool(self._refused_by)

    def usable(self, now_s: float) -> bytes | None:
        """The token, unless it is known to be good no more."""
        if self._refused_by or (self._until_s is not None and now_s >= self._until_s):
            return None
        return self.value

    def refresh(self) -> bool:
        """Looks at the file; true if it has another token. One that cannot be read changes nothing."""
        stamp = self._look()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            value = self._read()
        except TailraceError as error:
            logger.error("%s; the one that was read before stays in use", error.message)
            return False
        if value == self.value:
            return False
        self.value = value
        self._until_s = None
        self._refused_by.clear()
        self._told = False
        logger.info("the edge has read another token from %s", self._path)
        return True

    def note_identity(self, identity: Identity) -> None:
        """What the token says of itself. It is given up before its leeway is: others then know in time."""
        self._until_s = identity.expires_at

    def note_answer(self, upstream_id: str, status: int) -> None:
        """An upstream was asked with the token. Only 401 is about the token itself."""
        if status != 401:
            self._refused_by.discard(upstream_id)
            return
        self._refused_by.add(upstream_id)
        if not self._told:
            self._told = True
            logger.warning(
                "upstream %s refuses the edge's own token: put another one into %s. Until then sockets are "
                "opened with the tokens of readers, and neither deletions nor revocations are followed",
                upstream_id,
                self._path,
            )

    def _look(self) -> FileStamp | None:
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
    """A client as the edge knows it."""

    shared: bool  # the edge has checked it: what others may read it may be given, too
    ip: str = ""
    authorization: bytes | None = None
    until_s: float | None = None  # wall time at which what it may do ends
    identity: Identity | None = None
    via: bytes = b""  # the proxies that it came through
    request_id: bytes = b""

    @classmethod
    def of(cls, exchange: Exchange, *, shared: bool = False) -> Caller:
        """A client of which nothing was checked."""
        given = exchange.headers
        ip = exchange.peer.rpartition(":")[0]
        via, request_id = given.get(b"via", b""), exchange.request_id
        return cls(shared, ip, given.get(b"authorization"), via=via, request_id=request_id)


class Authenticator:
    """Checks tokens with the keys and the policy that the owner has.

    Credentials that cannot be checked here are the owner's to judge: such a client shares nothing.
    """

    def __init__(self, settings: Settings) -> None:
        self.verifier = TokenVerifier(settings) if settings.auth_configured else None

    @property
    def verifies(self) -> bool:
        return self.verifier is not None

    def admit(self, exchange: Exchange, name: str) -> Caller:
        """Refuses who may not do this to a stream, before anything is looked up or sent on."""
        caller = Caller.of(exchange, shared=b"authorization" not in exchange.headers)
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
        """Refuses a token that is not good, whatever it is for. What a good one may do there, the owner says.

        Who comes without one may be meant to: there are routes for everybody, and some ask on the socket.
        """
        caller = Caller.of(exchange)
        if self.verifier is None or caller.authorization is None:
            return caller
        return caller._replace(identity=self._identify(self.verifier, caller.authorization))

    def inspect(self, exchange: Exchange) -> None:
        """Refuses who may not look at the edge's own numbers."""
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

    def look_at(self, token: EdgeToken) -> None:
        """How long the edge's own token is good, if it can be read here. Whether it is, upstreams say."""
        try:
            if self.verifier is not None:
                token.note_identity(self.verifier.verify(token.value))
        except TailraceError:
            return

    def reload(self) -> None:
        """Somebody says that the keys are others."""
        if self.verifier is not None:
            self.verifier.reload()

    def changed(self) -> bool:
        """Whether keys or revocations are others than when this was asked last."""
        return self.verifier is not None and self.verifier.poll_changes()

    def stands(self, caller: Caller) -> bool:
        """Whether a client that was let in still would be."""
        if self.verifier is None or caller.identity is None:
            return True
        return self.verifier.is_valid(caller.identity)

    def check_still(self, caller: Caller, now_s: float) -> None:
        """Refuses a client that was let in and has waited, if what it came with is good no more."""
        if caller.until_s is not None and now_s >= caller.until_s:
            raise invalid_token_error("the token has expired")
        if not self.stands(caller):
            raise invalid_token_error("the token was revoked")

    def start(self) -> None:
        if self.verifier is not None:
            self.verifier.start()

    def close(self) -> None:
        if self.verifier is not None:
            self.verifier.close()


def is_opaque(authorization: bytes) -> bool:
    """Whether only the owner can tell what this is worth: no signed token, or one for a key."""
    return authorization.count(b".") != 2 or is_exchanged_token(authorization)
