from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.auth import (
    ANONYMOUS,
    Action,
    Identity,
    authorise,
    covers_pattern,
    covers_stream,
    visible_databases,
    visible_prefixes,
)
from tailrace.auth.policy import DATABASE_ACTIONS, Access
from tailrace.auth.tokens import SCOPES
from tailrace.common.errors import TailraceError
from tailrace.hub.policy import ActorRule, Policy, PolicyRules, TopicRule
from tailrace.hub.service import HubStreamAccess

# The actions, one by one: the scopes that are let through, of the four there are.
GRANTED_BY: dict[Action, set[str]] = {
    Action.PUBLIC: {"read", "write", "manage", "system"},
    Action.INSPECT_SERVER: {"manage"},
    Action.MANAGE_IDENTITIES: {"manage"},
    Action.FOLLOW_REVOCATIONS: {"read", "manage"},
    Action.SEAL: {"manage"},
    Action.READ_STREAM: {"read", "manage"},
    Action.WRITE_STREAM: {"write", "manage"},
    Action.DELETE_STREAM: {"manage"},
    Action.LIST: {"read", "manage"},
    Action.LIST_DATABASES: {"read", "manage"},
    Action.LIST_SYSTEM: {"manage"},
    Action.QUERY_STREAM: {"read", "manage"},
    Action.CONFIGURE_STREAM: {"manage"},
    Action.TOUCH_STREAM: {"read", "manage"},
    Action.INGEST_TRACES: {"write", "manage"},
    Action.CREATE_TRACES_STREAM: {"manage"},
    Action.MANAGE_SUBSCRIPTION: {"manage"},
    Action.READ_SUBSCRIPTION: {"read", "manage"},
    Action.CLAIM_WAKE: {"read", "manage"},
    Action.ANSWER_WAKE: {"read", "write", "manage", "system"},
    Action.PIPELINE: {"manage", "system"},
    Action.READ_DATABASE: {"read", "manage"},
    Action.WRITE_DATABASE: {"write", "manage"},
    Action.MANAGE_DATABASE: {"manage"},
    Action.WATCH: {"read", "manage"},
    Action.WATCH_WRITE: {"write", "manage"},
    Action.REPLICATION_PULL: {"read", "manage"},
    Action.REPLICATION_PUSH: {"write", "manage"},
    Action.HUB_CONNECT: {"read", "write", "manage", "system"},
    Action.HUB_ADMIN: {"manage"},
    Action.HUB_SHARDS: {"read", "manage"},
}


def identity(
    *scopes: str, streams: tuple[str, ...] | None = None, dbs: tuple[str, ...] | None = None, actor: str = ""
) -> Identity:
    return Identity(sub="x", scopes=frozenset(scopes), streams=streams, dbs=dbs, actor_id=actor)


def refusal(who: Identity, action: Action, **names: str) -> str:
    """The code of the refusal, or "" if there is none."""
    try:
        authorise(who, action, **names)
    except TailraceError as error:
        return error.code
    return ""


def names_for(action: Action) -> dict[str, str]:
    names = {"stream": "orders/1"} if action.access is not Access.NONE else {}
    if action in DATABASE_ACTIONS:
        names["db"] = "app"
    return names


def test_every_action_is_listed() -> None:
    assert set(GRANTED_BY) == set(Action)


@pytest.mark.parametrize("action", list(Action))
@pytest.mark.parametrize("scope", sorted(SCOPES))
def test_each_row_with_each_scope(action: Action, scope: str) -> None:
    expected = "" if scope in GRANTED_BY[action] else "forbidden"
    dbs = None if action is Action.MANAGE_IDENTITIES else ("app",)
    assert refusal(identity(scope, dbs=dbs), action, **names_for(action)) == expected


@pytest.mark.parametrize("action", list(Action))
def test_no_scope_at_all(action: Action) -> None:
    free = action in (Action.PUBLIC, Action.ANSWER_WAKE, Action.HUB_CONNECT)
    assert refusal(identity(dbs=("app",)), action, **names_for(action)) == ("" if free else "forbidden")


@pytest.mark.parametrize("action", list(Action))
def test_anonymous_may_do_everything(action: Action) -> None:
    assert refusal(ANONYMOUS, action, **names_for(action)) == ""


@pytest.mark.parametrize("action", [action for action in Action if action.access is not Access.NONE])
def test_each_row_that_names_a_stream_obeys_the_claim(action: Action) -> None:
    who = identity("read", "write", "manage", streams=("orders/", "logs"))
    for name in ("orders/1", "orders/a/b", "logs", "logs/x", "logs-2"):
        assert refusal(who, action, stream=name) == ""
    for name in ("orders", "orders-secret", "order", "Orders/1", "x/orders/1", "lo"):
        assert refusal(who, action, stream=name) == "forbidden"
    assert refusal(identity("read", "write", "manage", streams=()), action, stream="orders/1") == "forbidden"


def test_the_challenge_names_the_missing_scope() -> None:
    with pytest.raises(TailraceError) as caught:
        authorise(identity("read"), Action.WRITE_STREAM, stream="a")
    assert caught.value.status == 403
    assert dict(caught.value.headers)["WWW-Authenticate"].endswith(
        'error="insufficient_scope", scope="write"'
    )


def test_a_fork_needs_read_on_its_source() -> None:
    assert refusal(identity("write"), Action.WRITE_STREAM, stream="a") == ""
    assert refusal(identity("write"), Action.WRITE_STREAM, stream="a", source="b") == "forbidden"
    assert refusal(identity("write", "read"), Action.WRITE_STREAM, stream="a", source="b") == ""
    narrow = identity("write", "read", streams=("a/",))
    assert refusal(narrow, Action.WRITE_STREAM, stream="a/1", source="a/2") == ""
    assert refusal(narrow, Action.WRITE_STREAM, stream="a/1", source="b") == "forbidden"
    assert refusal(narrow, Action.WRITE_STREAM, stream="b", source="a/1") == "forbidden"
    assert refusal(narrow, Action.WRITE_STREAM, stream="a/1", source="__registry__") == "forbidden"
    assert (
        refusal(identity("write", "read"), Action.WRITE_STREAM, stream="a", source="__audit__") == "forbidden"
    )
    assert refusal(ANONYMOUS, Action.WRITE_STREAM, stream="a", source="__registry__") == ""


@pytest.mark.parametrize("action", [Action.READ_STREAM, Action.QUERY_STREAM, Action.TOUCH_STREAM])
def test_reading_system_streams(action: Action) -> None:
    for name in ("__registry__", "__stream_metrics__", "__segments__"):
        assert refusal(identity("read"), action, stream=name) == ""
        # A claim hides system streams, even one that spells their names.
        assert refusal(identity("read", streams=("__registry__", "__")), action, stream=name) == "forbidden"
        assert refusal(identity("manage", streams=("a/",)), action, stream=name) == ""
        assert refusal(identity("write"), action, stream=name) == "forbidden"
        assert refusal(identity("system"), action, stream=name) == "forbidden"
    for name in ("__changes__/db/c/0", "__deliveries__/g", "__subs__/g", "__audit__", "__sources__/db/pg"):
        assert refusal(identity("read"), action, stream=name) == "forbidden"
        assert refusal(identity("manage"), action, stream=name) == ""
        assert refusal(ANONYMOUS, action, stream=name) == ""


@pytest.mark.parametrize("name", ["__registry__", "__changes__/db/c/0", "__new__"])
def test_system_streams_are_written_with_system_only(name: str) -> None:
    for who in (
        ANONYMOUS,
        identity("read", "write", "manage"),
        identity(),
        identity("write", streams=("__",)),
    ):
        assert refusal(who, Action.WRITE_STREAM, stream=name) == "read_only_stream"
    assert refusal(identity("system"), Action.WRITE_STREAM, stream=name) == ""
    assert (
        refusal(identity("system", streams=("a/",)), Action.WRITE_STREAM, stream=name) == "read_only_stream"
    )
    for action in (Action.DELETE_STREAM, Action.CONFIGURE_STREAM):
        for who in (ANONYMOUS, identity("system", "manage")):
            assert refusal(who, action, stream=name) == "read_only_stream"


def test_a_job_is_let_do_what_it_was_made_for() -> None:
    """Append to one system stream, look at it, and nothing else."""
    job = identity("read", "system", streams=("__deliveries__/g",))
    for action in (Action.WRITE_STREAM, Action.READ_STREAM):
        assert refusal(job, action, stream="__deliveries__/g") == ""
    for name in ("__deliveries__/h", "__registry__", "__changes__/db/c/0", "hub/topic/x"):
        assert refusal(job, Action.WRITE_STREAM, stream=name) == "read_only_stream"
    for name in ("__deliveries__/h", "__registry__", "__changes__/db/c/0", "orders"):
        assert refusal(job, Action.READ_STREAM, stream=name) == "forbidden"
    assert refusal(job, Action.WRITE_STREAM, stream="orders") == "forbidden"
    assert refusal(job, Action.DELETE_STREAM, stream="__deliveries__/g") == "read_only_stream"
    for action in (Action.PIPELINE, Action.INSPECT_SERVER, Action.MANAGE_IDENTITIES, Action.SEAL):
        assert refusal(job, action) == "forbidden"
    assert refusal(job, Action.READ_DATABASE, db="app") == "forbidden"


@pytest.mark.parametrize("name", ["__deliveries__/g", "__registry__", "__new__"])
def test_where_nobody_has_a_token_system_streams_are_still_the_servers(name: str) -> None:
    for action in (Action.WRITE_STREAM, Action.INGEST_TRACES, Action.DELETE_STREAM, Action.CONFIGURE_STREAM):
        assert refusal(ANONYMOUS, action, stream=name) == "read_only_stream"


@pytest.mark.parametrize("action", list(Action))
def test_whoever_comes_without_a_token_reads_public_streams_and_is_asked_for_one_else(action: Action) -> None:
    everybody = msgspec.structs.replace(identity("read", streams=("news/",), dbs=()), public=True)
    names = names_for(action)
    reads = action in (Action.READ_STREAM, Action.QUERY_STREAM)
    for name in ("news/1", "news", "orders/1", "__registry__", "hub/topic/news", "hub/registry"):
        if "stream" in names:
            names["stream"] = name
        allowed = action is Action.PUBLIC or (reads and name == "news/1")
        assert refusal(everybody, action, **names) == ("" if allowed else "unauthorized"), name


@pytest.mark.parametrize("action", [Action.MANAGE_IDENTITIES, Action.PIPELINE])
def test_what_is_about_all_streams_needs_a_token_for_all(action: Action) -> None:
    assert refusal(identity("manage"), action) == ""
    assert refusal(identity("manage", streams=("a/",)), action) == "forbidden"
    databases = "forbidden" if action is Action.MANAGE_IDENTITIES else ""
    assert refusal(identity("manage", dbs=("app",)), action) == databases


def test_a_read_only_stream_says_what_it_allows() -> None:
    with pytest.raises(TailraceError) as caught:
        authorise(ANONYMOUS, Action.WRITE_STREAM, stream="__registry__")
    assert caught.value.status == 405
    assert caught.value.headers == (("Allow", "GET, HEAD, OPTIONS"),)


RULES = PolicyRules(
    actors=[
        ActorRule("@(blind/*)", discover=False, subscribe=False),
        ActorRule("@(box/*)", register=["@(shared/*)"]),
    ],
    topics=[TopicRule("jobs/secret", subscribers=["@(svc/alice)"])],
)


def under_rules(who: Identity, *, topics_open: bool = True) -> Identity:
    return msgspec.structs.replace(who, hub=HubStreamAccess(Policy(RULES, topics_open=topics_open)))


def test_streams_of_the_hub_are_read_by_whom_its_rules_allow() -> None:
    alice = under_rules(identity("read", actor="svc/alice", streams=("a/",)))
    bob = under_rules(identity("read", actor="svc/bob"))
    blind = under_rules(identity("read", actor="blind/x"))
    box = under_rules(identity("read", actor="box/x"))
    nobody = under_rules(identity("read"))
    allowed = {
        "hub/topic/jobs/secret": (alice,),
        "hub/topic/news": (alice, bob, box),
        "hub/registry": (alice, bob, box),
        "hub/mbox/svc/alice": (alice,),
        "hub/mbox/svc/alice/inbox": (alice,),
        "hub/mbox/shared/x": (box,),
        "hub/mbox/box/x": (),
        "hub/mbox/": (),
        "hub/broadcast/0": (),
        "hub/dead-letters": (),
        "hub/audit": (),
        "hub/trace": (),
    }
    for name, readers in allowed.items():
        for who in (alice, bob, blind, box, nobody):
            for action in (Action.READ_STREAM, Action.QUERY_STREAM):
                expected = "" if who in readers else "forbidden"
                assert refusal(who, action, stream=name) == expected, (name, who.actor_id)
            copied = refusal(
                msgspec.structs.replace(who, scopes=who.scopes | {"write"}, streams=None),
                Action.WRITE_STREAM,
                stream="copy",
                source=name,
            )
            assert copied == ("" if who in readers else "forbidden"), (name, who.actor_id)
        assert refusal(under_rules(identity("manage")), Action.READ_STREAM, stream=name) == ""
        assert refusal(ANONYMOUS, Action.READ_STREAM, stream=name) == ""
    shut = under_rules(bob, topics_open=False)
    assert refusal(shut, Action.READ_STREAM, stream="hub/topic/news") == "forbidden"


def test_the_claims_of_a_token_hold_for_streams_of_the_hub() -> None:
    said = b'{"capabilities": ["send", "discover"]}'
    sender = under_rules(msgspec.structs.replace(identity("read", actor="svc/alice"), claims=said))
    assert refusal(sender, Action.READ_STREAM, stream="hub/registry") == ""
    for name in ("hub/topic/news", "hub/topic/jobs/secret", "hub/mbox/svc/alice"):
        assert refusal(sender, Action.READ_STREAM, stream=name) == "forbidden"
    malformed = msgspec.structs.replace(sender, claims=b'{"capabilities": "all"}')
    assert refusal(malformed, Action.READ_STREAM, stream="hub/registry") == "forbidden"


def test_where_the_rules_are_not_known_only_what_they_may_allow_is_asked_for() -> None:
    """An edge passes such requests on, and the server refuses."""
    alice = identity("read", actor="svc/alice", streams=("a/",))
    for name in ("hub/mbox/svc/alice", "hub/mbox/svc/alice/inbox", "hub/topic/news", "hub/registry"):
        assert refusal(alice, Action.READ_STREAM, stream=name) == ""
        job = identity("read", "system", actor="svc/alice", streams=("a/",))
        assert refusal(job, Action.READ_STREAM, stream=name) == "forbidden"
    for name in (
        "hub/mbox/svc/alice2",
        "hub/mbox/svc",
        "hub/dead-letters",
        "hub/audit",
        "hub/trace",
        "hub/x",
    ):
        assert refusal(alice, Action.READ_STREAM, stream=name) == "forbidden"
        assert refusal(identity("manage"), Action.READ_STREAM, stream=name) == ""
        assert refusal(ANONYMOUS, Action.READ_STREAM, stream=name) == ""
    nobody = identity("read")
    assert refusal(nobody, Action.READ_STREAM, stream="hub/mbox/") == "forbidden"
    assert refusal(identity("write", actor="a"), Action.READ_STREAM, stream="hub/mbox/a") == "forbidden"
    # "hubs/1" is an ordinary name.
    assert refusal(identity("read", streams=("hubs/",)), Action.READ_STREAM, stream="hubs/1") == ""
    for who in (ANONYMOUS, alice, identity("system", "write", "manage")):
        assert refusal(who, Action.WRITE_STREAM, stream="hub/mbox/svc/alice") == "read_only_stream"
        assert refusal(who, Action.DELETE_STREAM, stream="hub/mbox/svc/alice") == "read_only_stream"


def test_databases() -> None:
    for action in sorted(DATABASE_ACTIONS, key=str):
        scope = sorted(GRANTED_BY[action])[-1]
        assert refusal(identity(scope, dbs=("app", "b")), action, db="app") == ""
        assert refusal(identity(scope, dbs=("app",)), action, db="ap") == "forbidden"
        assert refusal(identity(scope, dbs=()), action, db="app") == "forbidden"
        # Without the claim there is none, except for who manages.
        assert refusal(identity("read", "write"), action, db="app") == "forbidden"
        assert refusal(identity("manage"), action, db="app") == ""
        assert refusal(identity("manage", dbs=("b",)), action, db="app") == "forbidden"
        assert refusal(ANONYMOUS, action, db="app") == ""


def test_a_listing_shows_the_databases_that_may_be_read() -> None:
    there = ["b", "app", "c"]
    shown = [
        (ANONYMOUS, ["app", "b", "c"]),
        (identity("manage"), ["app", "b", "c"]),
        (identity("read", dbs=("c", "app", "gone")), ["app", "c"]),
        (identity("manage", dbs=("b",)), ["b"]),
        (identity("read", dbs=()), []),
        (identity("read"), []),
    ]
    for who, names in shown:
        assert visible_databases(who, there) == names
        assert names == [name for name in sorted(there) if not refusal(who, Action.READ_DATABASE, db=name)]


def test_a_pattern_has_to_be_covered_whole() -> None:
    who = identity("manage", streams=("orders/",))
    for pattern in ("orders/*", "orders/*/**", "orders/a/*", "orders/a/**", "orders/a"):
        assert refusal(who, Action.MANAGE_SUBSCRIPTION, pattern=pattern) == ""
    for pattern in ("**", "*", "order*", "orders", "orders/**", "*/orders/1", "orders**", "other/*"):
        assert refusal(who, Action.MANAGE_SUBSCRIPTION, pattern=pattern) == "forbidden"
    assert refusal(identity("manage"), Action.MANAGE_SUBSCRIPTION, pattern="**") == ""
    assert refusal(ANONYMOUS, Action.MANAGE_SUBSCRIPTION, pattern="**") == ""


segments = st.sampled_from(["a", "b", "ab", "a-b"])
names = st.lists(segments, min_size=1, max_size=3).map("/".join)
prefixes = st.one_of(names, names.map(lambda name: name + "/"), st.sampled_from(["a", "b", "a/a"]))


@given(st.lists(prefixes, max_size=4).map(tuple), prefixes | st.just(""), st.lists(names, max_size=8))
def test_listing_by_ranges_shows_exactly_what_is_covered(
    claims: tuple[str, ...], prefix: str, existing: list[str]
) -> None:
    who = identity("read", streams=claims)
    ranges = visible_prefixes(who, prefix)
    expected = sorted({name for name in existing if name.startswith(prefix) and covers_stream(who, name)})
    scanned = [name for start in ranges for name in sorted(set(existing)) if name.startswith(start)]
    assert scanned == expected


def test_listing_without_a_claim_is_one_range() -> None:
    assert visible_prefixes(ANONYMOUS, "x") == ("x",)


@given(st.lists(prefixes, min_size=1, max_size=3).map(tuple), names, names)
def test_a_covered_pattern_matches_covered_names_only(claims: tuple[str, ...], base: str, rest: str) -> None:
    who = identity("read", streams=claims)
    if covers_pattern(who, f"{base}/**"):
        assert covers_stream(who, base)
    if covers_pattern(who, f"{base}/**") or covers_pattern(who, f"{base}/*/**"):
        assert covers_stream(who, f"{base}/{rest}")
