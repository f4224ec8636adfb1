"""Authorization: one function for all routes; and the check of the listen address.

Each row of the routing table names its action, and the dispatcher the stream or database of the path; the
name then determines whether the rules of system streams or of the hub apply, so that no route can omit them.
Authorization comes before any check that the stream exists.
"""

# ruff: noqa: PIE796 - actions with equal rights are different members, see `Action.__new__`
from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final, NoReturn

from tailrace.auth.tokens import Identity, token_required_error
from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings

READ_ONLY_METHODS: Final = "GET, HEAD, OPTIONS"

# System streams that hold data before read rules are applied, or operational secrets.
PRIVILEGED_STREAMS: Final = ("__changes__/", "__deliveries__/", "__subs__/", "__sources__/", "__audit__")


class Access(enum.Enum):
    """What an action does with the stream it names."""

    NONE = 0
    READ = 1
    WRITE = 2
    MANAGE = 3


class Action(enum.Enum):
    """What a request does: the scopes of which one suffices, and the access to the stream it names.

    The routing table says which route does what.
    """

    PUBLIC = ("", Access.NONE)
    INSPECT_SERVER = ("manage", Access.NONE)
    MANAGE_IDENTITIES = ("manage", Access.NONE)
    FOLLOW_REVOCATIONS = ("read", Access.NONE)
    SEAL = ("manage", Access.READ)
    READ_STREAM = ("read", Access.READ)
    WRITE_STREAM = ("write", Access.WRITE)
    DELETE_STREAM = ("manage", Access.MANAGE)
    LIST = ("read", Access.NONE)
    LIST_SYSTEM = ("manage", Access.NONE)  # with system streams
    QUERY_STREAM = ("read", Access.READ)
    CONFIGURE_STREAM = ("manage", Access.MANAGE)
    TOUCH_STREAM = ("read", Access.READ)
    INGEST_TRACES = ("write", Access.WRITE)
    CREATE_TRACES_STREAM = ("manage", Access.MANAGE)  # traces for a stream that has to be created
    MANAGE_SUBSCRIPTION = ("manage", Access.READ)
    READ_SUBSCRIPTION = ("read", Access.READ)
    CLAIM_WAKE = ("read", Access.READ)
    ANSWER_WAKE = ("", Access.NONE)  # the wake's own token is required
    PIPELINE = ("manage system", Access.NONE)
    LIST_DATABASES = ("read", Access.NONE)
    READ_DATABASE = ("read", Access.NONE)
    WRITE_DATABASE = ("write", Access.NONE)
    MANAGE_DATABASE = ("manage", Access.NONE)
    WATCH = ("read", Access.NONE)
    WATCH_WRITE = ("write", Access.NONE)  # document writes over a WebSocket
    REPLICATION_PULL = ("read", Access.NONE)
    REPLICATION_PUSH = ("write", Access.NONE)
    HUB_CONNECT = ("", Access.NONE)
    HUB_ADMIN = ("manage", Access.NONE)  # admin functions of the hub
    HUB_SHARDS = ("read", Access.NONE)

    def __new__(cls, _scopes: str, _access: Access) -> Action:
        member = object.__new__(cls)
        member._value_ = len(cls.__members__)  # actions with equal rights are not the same
        return member

    def __init__(self, scopes: str, access: Access) -> None:
        # `manage` includes `read` and `write`; `system` includes nothing and is included in nothing.
        needed = set(scopes.split())
        self.required_scopes = " or ".join(scopes.split())
        self.scopes = frozenset(needed | {"manage"} if needed & {"read", "write"} else needed)
        self.access = access


# Actions allowed without a token on public streams (`auth_public_streams`).
PUBLIC_ACTIONS: Final = frozenset({Action.PUBLIC, Action.READ_STREAM, Action.QUERY_STREAM})

DATABASE_ACTIONS: Final = frozenset(
    {
        Action.READ_DATABASE,
        Action.WRITE_DATABASE,
        Action.MANAGE_DATABASE,
        Action.WATCH,
        Action.WATCH_WRITE,
        Action.REPLICATION_PULL,
        Action.REPLICATION_PUSH,
    }
)


def authorise(
    identity: Identity,
    action: Action,
    *,
    stream: str | None = None,
    source: str | None = None,
    db: str | None = None,
    pattern: str | None = None,
) -> None:
    """Return if the identity may do this, raise `forbidden` (or `read_only_stream`) if not.

    `source` is the origin of a fork and `pattern` the glob of a subscription; both must be readable, the
    latter for all matching names.
    """
    if identity.anonymous and source is None and (stream is None or not stream.startswith(("__", "hub/"))):
        # Fast path of a server without authentication: all scopes, streams and databases.
        return
    if identity.public:
        _authorise_public(identity, action, stream, source)
        return
    _authorise(identity, action, stream, source, db, pattern)


def is_allowed(identity: Identity, action: Action, *, stream: str) -> bool:
    """`authorise` as a boolean."""
    try:
        authorise(identity, action, stream=stream)
    except TailraceError:
        return False
    return True


def _authorise_public(identity: Identity, action: Action, stream: str | None, source: str | None) -> None:
    """Without a token: require one for everything except public streams."""
    if action is Action.PUBLIC:
        return
    if action not in PUBLIC_ACTIONS or stream is None or source is not None:
        raise token_required_error()
    if is_reserved_stream(stream) or not covers_stream(identity, stream):
        raise token_required_error()


def _authorise(
    identity: Identity,
    action: Action,
    stream: str | None,
    source: str | None,
    db: str | None,
    pattern: str | None,
) -> None:
    if stream is not None and action.access in _WRITE_ACCESS and is_reserved_stream(stream):
        _check_reserved_write(identity, action, stream)
    elif action.scopes and not (action.scopes & identity.scopes):
        _forbid(f"requires scope {action.required_scopes}", scope=action.required_scopes)
    elif stream is not None:
        if action.access in _WRITE_ACCESS:
            if not covers_stream(identity, stream):
                _forbid("the token does not cover this stream")
        else:
            _check_read(identity, stream)
    if source is not None:
        if not identity.scopes & _READ_SCOPES:
            _forbid("forking requires scope read on the source", scope="read")
        _check_read(identity, source)
    if action in _ALL_STREAMS_ACTIONS and identity.streams is not None:
        _forbid("requires a token for all streams", scope="manage")
    if action is Action.FOLLOW_REVOCATIONS and identity.streams is not None:
        if "manage" not in identity.scopes:
            _forbid("requires scope manage, or read for all streams", scope="manage")
    if action is Action.MANAGE_IDENTITIES and identity.dbs is not None:
        _forbid("requires a token for all databases", scope="manage")
    if pattern is not None and not covers_pattern(identity, pattern):
        _forbid("the token does not cover the whole pattern")
    if action in DATABASE_ACTIONS:
        assert db is not None, f"{action} names a database"
        _check_database(identity, db)


# A key can be created for any stream, and the pipeline publishes for all of them.
_ALL_STREAMS_ACTIONS: Final = frozenset({Action.MANAGE_IDENTITIES, Action.PIPELINE})
_WRITE_ACCESS: Final = frozenset({Access.WRITE, Access.MANAGE})
_READ_SCOPES: Final = frozenset({"read", "manage"})


def is_reserved_stream(name: str) -> bool:
    """Whether the server or the hub owns a stream; no `streams` claim changes the rules for these."""
    return name.startswith(("__", "hub/")) or name == "hub"


def is_hub_stream(name: str) -> bool:
    return name.startswith("hub/") or name == "hub"


def covers_stream(identity: Identity, name: str) -> bool:
    """Whether the `streams` claim covers a name.

    A claim is a plain prefix of the name: `orders/` covers `orders/7` but neither `orders` nor
    `orders-secret`; `orders` covers all three. Use the slash for a folder.
    """
    return identity.streams is None or name.startswith(identity.streams)


def covers_pattern(identity: Identity, pattern: str) -> bool:
    """Whether every name that a glob can match is covered: the part before its first star must be.

    `orders/**` also matches `orders`, which a claim `orders/` does not cover; `orders/*/**` is covered.
    """
    if identity.streams is None:
        return True
    literal, star, rest = pattern.partition("*")
    if star and rest.startswith("*"):
        literal = literal.removesuffix("/")
    return literal.startswith(identity.streams)


def visible_prefixes(identity: Identity, prefix: str) -> tuple[str, ...]:
    """The prefixes to scan for a listing of `prefix`: disjoint, in byte order; empty if none is covered."""
    if identity.streams is None:
        return (prefix,)
    if prefix.startswith(identity.streams):
        return (prefix,)
    narrower = sorted({claim for claim in identity.streams if claim.startswith(prefix)})
    disjoint: list[str] = []
    for claim in narrower:
        # In sorted order a prefix directly precedes the prefixes it contains.
        if not disjoint or not claim.startswith(disjoint[-1]):
            disjoint.append(claim)
    return tuple(disjoint)


def visible_databases(identity: Identity, names: Iterable[str]) -> list[str]:
    """The databases that a listing shows, sorted: those that the identity may read by name."""
    return sorted(name for name in names if identity.anonymous or _has_database(identity, name))


def _check_read(identity: Identity, name: str) -> None:
    if name.startswith("__"):
        if "system" in identity.scopes and identity.streams is not None and covers_stream(identity, name):
            return  # a job may read what it may write
        manages = "manage" in identity.scopes
        if name.startswith(PRIVILEGED_STREAMS) and not manages:
            _forbid("this system stream requires scope manage", scope="manage")
        if not manages and (identity.streams is not None or "read" not in identity.scopes):
            _forbid("system streams require scope manage, or read for all streams", scope="manage")
    elif is_reserved_stream(name):
        _check_hub_read(identity, name)
    elif not covers_stream(identity, name):
        _forbid("the token does not cover this stream")


def _check_hub_read(identity: Identity, name: str) -> None:
    """Apply the hub's own rules; operators may read everything, jobs nothing."""
    if "manage" in identity.scopes:
        return
    if identity.hub is not None:
        allowed = identity.hub.may_read(identity, name)
    else:
        allowed = _may_read_hub_stream(identity, name)
    if not allowed or "system" in identity.scopes:
        _forbid("the hub policy does not allow this identity to read this stream")


def _may_read_hub_stream(identity: Identity, name: str) -> bool:
    """What the hub's rules can allow at most, where they are not known (edge); the upstream checks again."""
    own = identity.actor_id
    mailbox = f"hub/mbox/{own}"
    owned = bool(own) and (name == mailbox or name.startswith(mailbox + "/"))
    return owned or name == "hub/registry" or name.startswith("hub/topic/")


def _check_reserved_write(identity: Identity, action: Action, name: str) -> None:
    appends = action in (Action.WRITE_STREAM, Action.INGEST_TRACES)
    if appends and name.startswith("__") and "system" in identity.scopes and covers_stream(identity, name):
        return
    raise TailraceError(
        "read_only_stream",
        "only the server writes this stream",
        headers=(("Allow", READ_ONLY_METHODS),),
    )


def _check_database(identity: Identity, db: str) -> None:
    if not _has_database(identity, db):
        _forbid("the token does not cover this database")


def _has_database(identity: Identity, db: str) -> bool:
    if identity.dbs is None:
        return "manage" in identity.scopes
    return db in identity.dbs


def _forbid(reason: str, *, scope: str = "") -> NoReturn:
    # Only the first of several alternatives: a list would mean that all of them are required.
    challenge = f', scope="{scope.partition(" ")[0]}"' if scope else ""
    raise TailraceError(
        "forbidden",
        reason,
        headers=(("WWW-Authenticate", f'Bearer realm="tailrace", error="insufficient_scope"{challenge}'),),
    )


def check_listen_address(settings: Settings) -> None:
    """Refuse to listen on a non-loopback address without authentication, unless `insecure` is set."""
    if settings.loopback_only or settings.auth_configured or settings.insecure:
        return
    raise TailraceError(
        "invalid_request",
        f"refusing to listen on {settings.host!r} without authentication: every client could read, "
        "write and delete everything. Set TAILRACE_AUTH_JWT_SECRET (32 bytes or more), "
        "TAILRACE_AUTH_JWKS_URL, TAILRACE_AUTH_JWKS_FILE or TAILRACE_AUTH_KEYS_FILE; or listen on 127.0.0.1; "
        "or pass --insecure if access to the port is restricted otherwise.",
    )
