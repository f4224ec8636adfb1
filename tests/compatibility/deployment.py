"""One server on a data directory and a bucket, and everything that its clients were given and keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jwt

from support.calls import Caller, Reply
from support.hub_client import Actor
from support.server import ServerProcess
from support.watch_client import Live

SECRET = "the secret of a stored deployment, which protects nothing"
ADMIN = "ops/admin"
ABILITIES = ["broadcast", "discover", "mailbox", "presence", "publish", "register", "send", "subscribe"]
# The settings file that is stored with the directory: names of settings must stay accepted, too.
GUARDED = f"""\
auth_jwt_secret = "{SECRET}"
recovery_key = "the recovery key of a stored deployment, which protects nothing"
auth_public_streams = "public/"
hub_durable_topics = "kept/*"
hub_token_age_ms = 0
"""
OPEN = """\
recovery_key = "the recovery key of a stored deployment, which protects nothing"
hub_durable_topics = "kept/*"
"""
JSON = {"Content-Type": "application/json"}
TEXT = {"Content-Type": "text/plain"}
BYTES = {"Content-Type": "application/octet-stream"}

Facts = dict[str, Any]


class Layout(NamedTuple):
    """A kind of deployment of which each version stores one."""

    name: str
    settings: str
    workers: int
    guarded: bool
    indexed: bool


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("one-worker", GUARDED, 1, guarded=True, indexed=True),
        Layout("two-workers", OPEN, 2, guarded=False, indexed=False),
    )
}


def token_for(actor: str, scope: str = "manage", **claims: Any) -> str:
    """A token that never expires."""
    return jwt.encode({"sub": actor, "scope": scope, **claims}, SECRET.encode(), algorithm="HS256")


def server_on(directory: Path, data: str = "data", *args: str, **env: str) -> ServerProcess:
    """A server on an unpacked archive; `data` is the name of its data directory."""
    flags = ("--config", str(directory / "tailrace.toml"), "--object-store", (directory / "bucket").as_uri())
    # As many workers as the directory has, and pages so small that most reads take several.
    common = {"TAILRACE_WORKERS": "0", "TAILRACE_READ_PAGE_ENTRIES": "7"}
    return ServerProcess(directory / data, args=(*flags, *args), env={**common, **env})


class Deployment:
    """Calls to one server, by HTTP and WebSocket, as its administrator or as one of its actors."""

    def __init__(self, server: ServerProcess, layout: Layout, *, behind_ms: int = 0) -> None:
        self.server = server
        self.layout = layout
        self._behind_ms = behind_ms  # of the server's clock, for messages that say when they were sent
        self.call = Caller(server, self.token(ADMIN))
        self.connections: list[Actor] = []

    def token(self, actor: str) -> str | None:
        return token_for(actor, capabilities=ABILITIES) if self.layout.guarded else None

    def ask(self, method: str, path: str, body: Any = None, *expected: int, **headers: str) -> Reply:
        """A request whose answer must be one of these; `Stream_Key="k"` is the header `Stream-Key: k`."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        reply = self.call(method, path, body, headers=sent)
        assert reply.status in (expected or (200, 201, 204)), (method, path, reply)
        return reply

    def actor(self, address: str) -> Actor:
        token, words = self.token(address), ["mailbox"]
        actor = Actor(self.server, f"@({address})", token=token, words=words, behind_ms=self._behind_ms)
        assert actor.connected["type"] == "hub:connected", actor.connected
        return actor

    def live(self) -> Live:
        """A realtime connection that asks for a token with each event."""
        live = Live(self.server, token=self.token(ADMIN))
        given = {} if self.token(ADMIN) is None else {"token": self.token(ADMIN)}
        live.send("auth", "a", database="default", tokens="each", **given)
        assert live.take()["type"] == "auth_ack"
        return live
