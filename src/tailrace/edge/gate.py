"""Who is asking, and whether the edge can vouch for it: only then may answers be shared."""

from __future__ import annotations

from typing import NamedTuple

from tailrace.auth import Action, Identity, TokenVerifier, authorise, invalid_token_error, is_exchanged_token
from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings
from tailrace.edge.token import EdgeToken
from tailrace.http.exchange import Exchange

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
        return self.verifier is not None and self.verifier.changed()

    def stands(self, caller: Caller) -> bool:
        """Whether a client that was let in still would be."""
        if self.verifier is None or caller.identity is None:
            return True
        return self.verifier.stands(caller.identity)

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
