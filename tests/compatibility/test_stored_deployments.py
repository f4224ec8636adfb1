"""Data directories and buckets of earlier versions, as their servers left them when they were killed.

Every archive in `stored/` is opened by the present server: it must read as it did for the version that wrote
it, clients must be able to continue with the offsets, tokens, cursors and keys that they were given, and
nothing that the present server writes may be in a format that the earlier version does not know.
"""

from __future__ import annotations

import base64
import json
import re
import sqlite3
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet
import pytest
import xxhash
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from compatibility.answers import differences
from compatibility.archive import STORED, pack, unpack, write
from compatibility.contents import (
    DOCS,
    ENTITY,
    GROUP,
    QUERY,
    SUBSCRIPTION,
    append,
    producing,
    put_document,
)
from compatibility.deployment import ADMIN, BYTES, LAYOUTS, TEXT, Deployment, Facts, Layout, server_on
from crash.world import World, build
from support.calls import Caller, eventually
from support.cli import Finished, tailrace
from support.hooks import Hook
from support.loss import seal
from support.replica import Replica
from support.wire import Wire

ARCHIVES = sorted(STORED.glob("*/*.tar.xz"))
NAMES = [f"{path.parent.name}-{path.name.removesuffix('.tar.xz')}" for path in ARCHIVES]
# Packages of any version; `tailrace.search` and `tailrace.touch` are also names of metrics.
PACKAGES = (
    *("api", "auth", "cli", "client", "cluster", "common", "edge", "http", "hub", "log", "net", "pipeline"),
    *("profiles", "protocol", "query", "schema", "server", "spark", "storage", "store", "subscriptions"),
    *("tier", "watch", "workers"),
)
MODULE = re.compile(rb"\btailrace\.(?:%b)\b|pyspark_tailrace" % "|".join(PACKAGES).encode())
OPERATIONS = frozenset(
    {
        *("append", "create", "delete", "touch", "meta", "bind", "sealed", "trim", "recorded"),
        *("describe", "published", "compacted"),
    }
)


class Shelf:
    """Unpacks archives, and starts servers at the time at which they were written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._library = build(directory)
        self._count = 0

    def unpack(self, archive: Path) -> tuple[Path, Facts]:
        self._count += 1
        directory = self._directory / str(self._count)
        return directory, unpack(archive, directory)

    def start(self, directory: Path, facts: Facts, *args: str, data: str = "data", **env: str) -> Deployment:
        """A server whose clock continues from when the archive was written."""
        world = World(self._library, self._directory / f"clock-{directory.name}", directory)
        behind_ns = time.time_ns() - facts["written_ns"]
        world.set_clock(-behind_ns / 1e9)
        server = server_on(directory, data, *args, **world.env, **env).start()
        return Deployment(server, LAYOUTS[facts["layout"]], behind_ms=behind_ns // 1_000_000)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("stored"))


@pytest.fixture(scope="module", params=ARCHIVES, ids=NAMES)
def archive(request: pytest.FixtureRequest) -> Path:
    return request.param


class Shared(NamedTuple):
    """One opened archive for the tests that continue what it holds, each something else."""

    to: Deployment
    facts: Facts
    differences: list[str]


@pytest.fixture(scope="module")
def opened(shelf: Shelf, archive: Path) -> Iterator[Shared]:
    directory, facts = shelf.unpack(archive)
    to = shelf.start(directory, facts)
    try:
        yield Shared(to, facts, differences(to, facts["answers"]))  # before any test writes
    finally:
        to.server.stop()


def test_there_is_an_archive_of_each_layout() -> None:
    for version in {path.parent for path in ARCHIVES} or {STORED}:
        assert {path.name for path in version.iterdir()} == {f"{layout}.tar.xz" for layout in LAYOUTS}


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_make_archive_stores_what_the_present_server_opens(
    layout: Layout, shelf: Shelf, tmp_path: Path
) -> None:
    write(layout, tmp_path)
    archive = tmp_path / f"{layout.name}.tar.xz"
    pack(tmp_path, archive)
    directory, facts = shelf.unpack(archive)
    to = shelf.start(directory, facts)
    try:
        assert differences(to, facts["answers"]) == []
    finally:
        to.server.stop()


def test_every_read_has_the_stored_answer(opened: Shared) -> None:
    assert opened.differences == []
    assert len(opened.facts["answers"]) > 200


# -- streams -------------------------------------------------------------------------------------------------


def test_producers_are_where_they_were(opened: Shared) -> None:
    call = opened.to.call

    def status(name: str, who: str, epoch: int, seq: int, **more: str) -> int:
        sent = {key.replace("_", "-"): value for key, value in {**producing(who, epoch, seq), **more}.items()}
        return call("POST", name, [0], headers=sent).status

    before = call("HEAD", "producers").headers["stream-next-offset"]
    assert [status("producers", "one", 2, seq) for seq in range(5)] == [204] * 5
    assert status("producers", "two", 0, 0) == 204
    assert call("HEAD", "producers").headers["stream-next-offset"] == before
    assert (status("producers", "one", 1, 0), status("producers", "one", 2, 6)) == (403, 409)
    assert status("producers", "one", 2, 5) == 200
    assert status("life/closed-by-producer", "closer", 0, 0, Stream_Closed="true") == 204


def test_streams_continue(opened: Shared) -> None:
    to, call = opened.to, opened.to.call
    for name in ("plain/json", "fork/of/fork", "life/ttl", "created/in/part/1", "created/in/part/2"):
        tail = call("HEAD", name).headers["stream-next-offset"]
        assert append(to, name, "continued") > tail
        assert call("GET", f"{name}?offset={tail}").body == ["continued"]
    for name, kind in (("plain/bytes", BYTES), ("plain/text", TEXT)):
        tail = call("HEAD", name).headers["stream-next-offset"]
        assert call("POST", name, b"continued", headers=kind).status == 204
        assert call("GET", f"{name}?offset={tail}").raw == b"continued"
    assert call("POST", "life/closed", b"more", headers=TEXT).status == 409
    assert call("POST", "plain/seq", [1], headers={"Stream-Seq": "a"}).status == 409
    assert call("POST", "schema/orders", [{"ts": "of the first version"}]).status == 400
    assert call("PUT", "deleted/source", headers=TEXT).status == 409
    fork = {"Stream-Forked-From": "/v1/stream/plain/json"}
    assert call("PUT", "fork/json", headers=fork).status == 200
    assert call("PUT", "fork/later", headers=fork).status == 201
    assert call("GET", "fork/later?offset=-1").raw == call("GET", "plain/json?offset=-1").raw


def test_readers_continue(opened: Shared) -> None:
    to, facts = opened.to, opened.facts
    wire = Wire(to.server.port, bearer=to.token(ADMIN))
    first = to.call("GET", "plain/json?offset=-1").body
    with wire.events("plain/json?offset=-1&live=sse", {"Last-Event-ID": facts["event_id"]}) as events:
        seen = json.loads(events.data())
    assert seen[0] not in first
    later = to.call("GET", f"plain/keyed?since={facts['sealed_ns']}").body
    assert later[:2] == [1, 2]


def test_searches_use_the_stored_indexes(opened: Shared) -> None:
    if not opened.to.layout.indexed:
        return
    found = opened.to.ask("POST", "profile/evlog/_search", {"q": "message:customer", "size": 1}).body[
        "coverage"
    ]
    assert found["complete"]
    assert found["indexed_segments"] > 0
    assert "fts" in found["index_families_used"]
    span = {"rollup": "requests", "from": 1767225600000, "to": 1767226200000, "interval": "1m"}
    found = opened.to.ask("POST", "profile/evlog/_aggregate", span).body["coverage"]
    assert (found["complete"], found["used_rollups"], found["index_families_used"]) == (True, True, ["agg"])


def test_touch_cursors_are_accepted(opened: Shared) -> None:
    table = xxhash.xxh3_64_hexdigest(b"tbl\0" + ENTITY.encode())
    asked = {"cursor": opened.facts["touch_cursor"], "keys": [table], "timeoutMs": 0}
    found = opened.to.ask("POST", "profile/state/touch/wait", asked).body
    assert found["touched"] is True
    assert not found.get("stale")


# -- subscriptions -------------------------------------------------------------------------------------------


def test_subscriptions_continue_where_their_workers_were(opened: Shared) -> None:
    call, stored = opened.to.call, opened.facts["claim"]
    base = "__ds/subscriptions/jobs"
    over = {"wake_id": stored["wake_id"], "generation": stored["generation"], "done": True}
    refused = call("POST", f"{base}/ack", over, token=stored["token"])
    assert refused.code == "FENCED", "the token of a wake that is over is known"
    claimed = call("POST", f"{base}/claim", {"worker": "w2"}).body
    assert claimed["generation"] > stored["generation"]
    (jobs,) = [one for one in claimed["streams"] if one["path"] == "jobs/a"]
    assert jobs["acked_offset"] == "00000000000000000008000000"
    assert jobs["has_pending"]
    done = {"wake_id": claimed["wake_id"], "generation": claimed["generation"], "done": True}
    acks = [{"stream": "jobs/a", "offset": jobs["tail_offset"]}]
    assert call("POST", f"{base}/ack", {**done, "acks": acks}, token=claimed["token"]).status == 200


def test_webhooks_are_signed_with_the_stored_key(opened: Shared) -> None:
    to, hook = opened.to, Hook()
    try:
        hook.answer = b'{"done": true}'
        given = {"type": "webhook", "pattern": "signed/*", "webhook": {"url": hook.url}}
        to.ask("PUT", "__ds/subscriptions/signed", given, 201)
        to.ask("PUT", "signed/a", [1], 201)
        delivery = hook.next()
    finally:
        hook.close()
    signature = dict(part.split("=", 1) for part in delivery.headers["webhook-signature"].split(","))
    (key,) = [one for one in opened.facts["jwks"]["keys"] if one["kid"] == signature["kid"]]
    public = Ed25519PublicKey.from_public_bytes(base64.urlsafe_b64decode(key["x"] + "=="))
    signed = base64.urlsafe_b64decode(signature["ed25519"] + "==")
    public.verify(signed, f"{signature['t']}.".encode() + delivery.raw)


# -- the hub -------------------------------------------------------------------------------------------------


def test_mailboxes_deliver_what_waits(opened: Shared) -> None:
    sender = opened.to.actor("shop/web")
    found = sender.ask("hub:discover", {"pattern": "@(svc/*)"})["payload"]["actors"]
    assert {one["address"] for one in found} >= set(opened.facts["registered"])
    producer = {"producer": {"id": "w", "epoch": 0, "seq": 0}}
    once = {"to": "@(svc/bill)", "type": "order", "data": "once", "ack": "accepted"}
    assert sender.ask("hub:send", once, metadata=producer)["payload"]["duplicate"] is True
    owner = opened.to.actor("svc/bill")
    owner.register(durable=True, commit="manual")
    assert [owner.of("order")["payload"] for _ in range(4)] == [{"id": 2}, {"id": 3}, {"id": 4}, "once"]
    assert owner.of("closing")["payload"] == 5
    assert owner.quiet() == []
    page = owner.ask("hub:mailbox_read", {"actorAddress": "@(svc/bill)", "offset": "committed", "limit": 1})
    assert page["payload"]["committed"] == opened.facts["mailbox_committed"]
    owner.close()
    sender.close()


def test_durable_subscribers_continue(opened: Shared) -> None:
    reader, member = opened.to.actor("svc/reader"), opened.to.actor("svc/member")
    reader.register()
    member.register(commit="manual")
    found = reader.ask("hub:subscribe", SUBSCRIPTION)["payload"]
    assert found["subscriptionId"] == opened.facts["topic_subscription"]
    assert reader.of("news")["payload"] == 2
    assert member.ask("hub:subscribe", GROUP)["type"] == "hub:subscribed"
    assert [member.of("news")["payload"] for _ in range(2)] == [1, 2]
    reader.close()
    member.close()


# -- documents -----------------------------------------------------------------------------------------------


def test_resume_tokens_are_accepted(opened: Shared) -> None:
    live = opened.to.live()
    live.send("resume", "r", subId="s", token=opened.facts["resume_token"], query=QUERY)
    acknowledged = live.take()
    assert (acknowledged["type"], acknowledged["payload"]["status"]) == ("resume-ack", "ok"), acknowledged
    deltas = [event["payload"]["delta"] for event in (live.take(), live.take())]
    live.close()
    assert {(delta["doc"]["id"], delta["op"], delta["reason"]) for delta in deltas} == {
        ("o-2", "insert", "entered"),
        ("o-11", "delete", "left"),
    }


def test_replication_checkpoints_are_accepted(opened: Shared) -> None:
    first, last = opened.facts["checkpoints"]
    replica = Replica(opened.to.call, "orders")
    changed, _ = replica.walk(last)
    assert {one["id"] for one in changed} == {"o-2", "o-11"}
    known, _ = replica.pull(limit=5)
    others, _ = replica.walk(first)
    everything, _ = replica.walk()
    assert {one["id"] for one in (*known, *others)} == {one["id"] for one in everything}
    assert {one["id"] for one in everything if one["_deleted"]} == {"o-1"}


def test_collections_continue(opened: Shared) -> None:
    to = opened.to
    version = to.ask("GET", f"{DOCS}/docs/todos/pushed").body["version"]
    put_document(to, "todos/pushed", {"n": 10})
    assert to.ask("GET", f"{DOCS}/docs/todos/pushed").body["version"] == version + 1
    assert to.call("PUT", f"{DOCS}/docs/orders/o-9", {"total": 5000}).status == 403, "the stored rule holds"
    record = {"type": "order", "key": "c", "value": {"n": 3}, "headers": {"operation": "insert"}}
    append(to, "source/changes", record)
    path = f"{DOCS}/docs/followed/c"
    assert eventually(lambda: to.call("GET", path), lambda reply: reply.status == 200).body["data"] == {
        "n": 3
    }


def test_documents_are_restored_from_views_and_changes(shelf: Shelf, archive: Path) -> None:
    """Without `watch.db`; then views are published again, in the stored format."""
    directory, facts = shelf.unpack(archive)
    before = documents(directory)
    (head,) = (directory / "bucket" / "watch").rglob("_head.json")
    number = json.loads(head.read_bytes())["number"]
    for path in (directory / "data").rglob("watch.db*"):
        path.unlink()
    busy = {"TAILRACE_WATCH_VIEW_MS": "100", "TAILRACE_WATCH_CARE_MS": "100"}
    to = shelf.start(directory, facts, **busy)
    try:
        stored = [one for one in facts["answers"] if one["path"].startswith(DOCS)]
        assert len(stored) >= 10
        assert differences(to, stored) == []
        put_document(to, "published/p-9", {"n": 9})
        seal(to.call)
        eventually(lambda: json.loads(head.read_bytes())["number"], lambda seen: seen > number)
    finally:
        to.server.stop()
    assert new_members(before, documents(directory)) == {}


# -- identities ----------------------------------------------------------------------------------------------


def test_keys_and_revocations_hold(opened: Shared) -> None:
    if not opened.to.layout.guarded:
        return
    call, facts = Caller(opened.to.server), opened.facts
    assert call("GET", "public/notes?offset=-1").raw == b"readable without a token"
    assert call("GET", "plain/empty").status == 401
    assert call("GET", "plain/empty", token=facts["admin"]).status == 200
    # The key may write below `plain/` and read nothing.
    assert call("POST", "plain/late", [3], token=facts["key"]).status == 204
    assert call("POST", "producers", [3], token=facts["key"]).status == 403
    assert call("GET", "plain/late", token=facts["key"]).status == 403
    assert [call("GET", "plain/empty", token=one).status for one in facts["refused"]] == [401] * 3


# -- files ---------------------------------------------------------------------------------------------------


def command(directory: Path, *arguments: str) -> Finished:
    bucket = ("--object-store", (directory / "bucket").as_uri())
    done = tailrace(*arguments, "--data-dir", str(directory / "data"), *bucket)
    assert done.code == 0, (arguments, done.out, done.err)
    return done


def check_by_command(directory: Path) -> set[str]:
    """What an operator runs; the kinds of operations in the journal."""
    assert command(directory, "verify").out.endswith(": no findings\n")
    no_java = {"TAILRACE_PIPELINE": "off"}
    checked = tailrace("doctor", "--data-dir", str(directory / "data"), "--port", "0", "--json", env=no_java)
    assert checked.code == 0, checked.out
    data = ("--data-dir", str(directory / "data"), "--json")
    hot = tailrace("inspect", "hot", *data)
    assert (hot.code, bool(hot.rows)) == (0, True)
    journal = tailrace("inspect", "journal", *data)
    assert journal.code == 0
    return {op["kind"] for row in journal.rows for op in row.get("ops", ())}


def databases(directory: Path) -> dict[str, Any]:
    """The schema of each database."""
    found: dict[str, Any] = {}
    for path in sorted((directory / "data").rglob("*.db")):
        database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        query = "SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_stat%' ORDER BY name"
        numbers = [
            database.execute(f"PRAGMA {name}").fetchone() for name in ("user_version", "application_id")
        ]
        found[str(path.relative_to(directory))] = (database.execute(query).fetchall(), numbers)
        database.close()
    return found


def shape(path: Path) -> str:
    """A name without what differs from one file to the next."""
    return re.sub(r"(?<=/)[0-9a-f]{2}(?=/)|[0-9a-f]{16,}|[0-9]+", "*", str(path))


def shapes(directory: Path) -> set[str]:
    return {shape(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def immutable(directory: Path) -> dict[str, bytes]:
    """Objects that are written once: segments, index files and plans."""
    folders = {"segments", "companions", "plans"}
    files = [path for path in (directory / "bucket").rglob("*") if path.is_file()]
    found = [path for path in files if folders & set(path.relative_to(directory).parts)]
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def documents(directory: Path) -> dict[str, set[str]]:
    """The members of each kind of JSON file."""
    found: dict[str, set[str]] = {}
    for path in (*(directory / "bucket").rglob("*.json"), *(directory / "data").rglob("*.json")):
        content = json.loads(path.read_bytes())
        members = set(content) if isinstance(content, dict) else set()
        found.setdefault(shape(path.relative_to(directory)), set()).update(members)
    return found


def new_members(before: dict[str, set[str]], after: dict[str, set[str]]) -> dict[str, set[str]]:
    added = {name: members - before.get(name, set()) for name, members in after.items()}
    return {name: members for name, members in added.items() if members}


def test_entries_are_in_every_place_that_holds_some(shelf: Shelf, archive: Path) -> None:
    """An archive that had everything in segments would say little about the journal and the hot store."""
    directory, facts = shelf.unpack(archive)
    layout = LAYOUTS[facts["layout"]]
    data = ("--data-dir", str(directory / "data"), "--json")
    journal = tailrace("inspect", "journal", *data)
    in_journal = {op["stream"] for row in journal.rows for op in row.get("ops", ()) if op["kind"] == "append"}
    assert len(in_journal) > 10
    filled = ["blocks", "companions", "documents", "forks", "meta", "producers", "segments", "tombstones"]
    for table in filled if layout.indexed else [name for name in filled if name != "companions"]:
        assert rows_of(directory, table) > 0, table
    assert len(list((directory / "data").rglob("hot.db"))) == layout.workers
    heads = [json.loads(path.read_bytes()) for path in (directory / "bucket").rglob("manifest.json")]
    assert any(head.get("deleted") for head in heads)
    assert max(len(head.get("segments", ())) for head in heads) >= 2
    assert any(head.get("replaced") for head in heads) == layout.indexed
    assert list((directory / "bucket" / "watch").rglob("*.parquet"))


def rows_of(directory: Path, table: str) -> int:
    count = 0
    for path in (directory / "data").rglob("hot.db"):
        database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        count += database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        database.close()
    return count


def test_opening_changes_no_format(shelf: Shelf, archive: Path) -> None:
    directory, facts = shelf.unpack(archive)
    before = (databases(directory), documents(directory), shapes(directory), immutable(directory))
    version = (directory / "data" / "VERSION").read_bytes()
    assert check_by_command(directory) <= OPERATIONS
    to = shelf.start(directory, facts)
    try:
        append(to, "plain/json", "written by the present version")
        append(to, "fork/json", "written by the present version")
        put_document(to, "orders/o-3", {"total": 33})
        seal(to.call)
        # What was in the hot store and in the journal is now read from segments.
        moved = ("plain/json", "fork/json", "__", "hub/", "orders")
        stored = [one for one in facts["answers"] if one["expect"] == "bytes"]
        kept = [one for one in stored if not one["path"].startswith(moved)]
        assert len(kept) > 100
        assert differences(to, kept) == []
    finally:
        to.server.stop()
    after = (databases(directory), documents(directory), shapes(directory), immutable(directory))
    assert after[0] == before[0]
    assert (directory / "data" / "VERSION").read_bytes() == version
    assert new_members(before[1], after[1]) == {}
    assert after[2] - before[2] == set()
    assert {name: after[3].get(name) for name in before[3]} == before[3]
    assert check_by_command(directory) <= OPERATIONS


def test_a_new_directory_is_restored_from_the_bucket_alone(shelf: Shelf, archive: Path) -> None:
    directory, facts = shelf.unpack(archive)
    workers = {"TAILRACE_WORKERS": str(LAYOUTS[facts["layout"]].workers)}
    to = shelf.start(directory, facts, "--bootstrap", data="restored", **workers)
    try:
        assert differences(to, facts["bootstrapped"]) == []
        assert append(to, "plain/json", "continued")
    finally:
        to.server.stop()


def test_no_module_or_class_is_named_in_stored_files(shelf: Shelf, archive: Path) -> None:
    """Modules are moved and renamed; a file that names one could not be read afterwards."""
    directory, _ = shelf.unpack(archive)
    for path in directory.rglob("*"):
        if path.is_file():
            assert MODULE.findall(content_of(path)) == [], path


def content_of(path: Path) -> bytes:
    """Its bytes, and what they are when they are unpacked."""
    raw = path.read_bytes()
    if path.suffix == ".parquet":
        return raw + repr(pyarrow.parquet.read_table(path).to_pylist()).encode()
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as packed:
            return raw + b"".join(map(packed.read, packed.namelist()))
    return raw
