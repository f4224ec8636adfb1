"""`tailrace salvage`: everything that can be read, in a directory that a server starts on."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from support.calls import Caller, eventually
from support.cli import Finished, tailrace
from support.damage import (
    PAGE_BYTES,
    TEXT,
    UNSEALED,
    checkpointed,
    damage_journal,
    filled,
    line,
    overwrite_page,
    state_of,
)
from support.sealing import SEALING_ENV, unsealed_blocks, wait_sealed
from support.server import ServerProcess
from support.workers import names_of
from tailrace.protocol.offsets import encode_offset

JSON = {"Content-Type": "application/json"}


def salvage(old: Path, new: Path, *flags: str) -> Finished:
    """Runs it; the old directory is the same afterwards, whatever happens."""
    before = state_of(old)
    done = tailrace("salvage", str(old), str(new), *flags)
    assert state_of(old) == before
    return done


def summary_of(done: Finished) -> dict[str, object]:
    return json.loads(done.out.splitlines()[-1])["summary"]


def losses_of(done: Finished) -> dict[str, int]:
    rows = [json.loads(row) for row in done.out.splitlines()[:-1]]
    return {row["stream"]: row["entries"] for row in rows}


def entries_in(server: ServerProcess, name: str) -> list[bytes]:
    body = Caller(server)("GET", f"{name}?offset=-1").raw
    return body.splitlines(keepends=True)


def test_a_sound_directory_is_copied_whole(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    server = ServerProcess(old, env=SEALING_ENV).start()
    call = Caller(server)
    assert call("PUT", "orders", headers=JSON).status == 201
    for number in range(30):
        headers = {**JSON, "Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": str(number)}
        assert call("POST", "orders", b'{"n":%d}' % number, headers=headers).status < 300
    assert call("PUT", "fork", headers={"Stream-Forked-From": "/v1/stream/orders"}).status == 201
    assert call("POST", "fork", b'{"n":"fork"}', headers=JSON).status == 204
    assert call("PUT", "gone", headers=TEXT).status == 201
    assert call("DELETE", "gone").status == 204
    wait_sealed(old)
    assert call("POST", "orders", b'{"n":"last"}', headers=JSON).status == 204
    answers = {name: call("GET", f"{name}?offset=-1") for name in ("orders", "fork", "gone")}
    server.kill()
    done = salvage(old, new)
    assert done.code == 0, done.out + done.err
    assert done.out.endswith("nothing is missing\n")
    assert tailrace("verify", "--data-dir", str(new)).code == 0
    with ServerProcess(new, env=SEALING_ENV) as copy:
        call = Caller(copy)
        for name, before in answers.items():
            after = call("GET", f"{name}?offset=-1")
            assert (after.status, after.raw) == (before.status, before.raw)
            assert after.headers.get("stream-next-offset") == before.headers.get("stream-next-offset")
        repeated = {**JSON, "Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": "29"}
        assert call("POST", "orders", b"[0]", headers=repeated).status == 204
        assert call("POST", "orders", b'{"n":"more"}', headers=JSON).status == 204


def test_a_damaged_record_is_left_out_and_all_others_are_there(tmp_path: Path) -> None:
    old, new = filled(tmp_path / "old"), tmp_path / "new"
    damage_journal(old, record=-9)
    refused = ServerProcess(old)
    refused.start(ready=False)
    assert refused.wait_exit() == 1
    done = salvage(old, new, "--json")
    assert done.code == 1, done.out + done.err
    assert losses_of(done) == {"orders": 1}
    assert summary_of(done)["entries_missing"] == 1
    with ServerProcess(new, env=UNSEALED) as server:
        found = entries_in(server, "orders")
        assert [one for one in map(line, range(20)) if one not in found] == [line(11)]
        assert found == [one for one in map(line, range(20)) if one != line(11)]
        call = Caller(server)
        # Offsets from behind the lost entry may not find another one; those before it are as they were.
        assert call("GET", f"orders?offset={encode_offset(0, 13)}").status in (400, 410)
        assert call("POST", "orders", b"more\n", headers=TEXT).status == 204
        assert entries_in(server, "orders")[-1] == b"more\n"


def test_pages_of_the_hot_store_that_are_damaged(tmp_path: Path) -> None:
    sound = checkpointed(tmp_path / "sound")
    pages = (sound / "hot.db").stat().st_size // PAGE_BYTES
    assert pages > 20
    expected = [line(number, 12_000) for number in range(20)]
    lost = 0
    for page in range(0, pages, 5):
        old, new = tmp_path / f"old-{page}", tmp_path / f"new-{page}"
        copy_tree(sound, old)
        overwrite_page(old / "hot.db", page)
        done = salvage(old, new, "--json")
        lost += done.code
        assert tailrace("verify", "--data-dir", str(new)).code == 0
        with ServerProcess(new, env=UNSEALED) as server:
            names = [entry["name"] for entry in Caller(server)("GET", "/v1/streams").body]
            [name] = [name for name in names if not name.startswith("__")]
            found = entries_in(server, name)
            assert len(set(found)) == len(found)
            assert [one for one in expected if one in found] == [one for one in found if one in expected]
            if name == "orders" and done.code == 0:
                assert found == expected
    assert lost, "no page was of any importance"


def copy_tree(source: Path, target: Path) -> None:
    import shutil

    shutil.copytree(source, target)


def test_a_hot_store_that_is_gone(tmp_path: Path) -> None:
    old, new = checkpointed(tmp_path / "old"), tmp_path / "new"
    (old / "hot.db").write_bytes(b"this is no database" * 10_000)
    done = salvage(old, new)
    assert done.code == 1
    assert "hot.db is damaged" in done.out
    with ServerProcess(new, env=UNSEALED) as server:
        call = Caller(server)
        assert call("PUT", "orders", headers=TEXT).status == 201, "the name is lost with the hot store"
        assert call("POST", "orders", b"again\n", headers=TEXT).status == 204


def test_a_journal_file_without_its_first_sector(tmp_path: Path) -> None:
    old, new = filled(tmp_path / "old"), tmp_path / "new"
    files = [path for path in (old / "journal").glob("*.jnl") if any(path.read_bytes()[:64])]
    [path] = files
    data = path.read_bytes()
    path.write_bytes(bytes(512) + data[512:])
    done = salvage(old, new)
    assert done.code == 1
    with ServerProcess(new, env=UNSEALED) as server:
        listed = Caller(server)("GET", "/v1/streams").body
        names = [one["name"] for one in listed if not one["name"].startswith("__")]
        assert any(name.startswith("salvaged/") for name in names), "of one the name was in that sector"
        found = [one for name in names for one in entries_in(server, name)]
        assert set(found) >= {line(number) for number in range(10, 20)}


def test_the_directory_of_several_workers(tmp_path: Path) -> None:
    names = (next(names_of(0, 2)), next(names_of(1, 2)))
    old, new = filled(tmp_path / "old", "--workers", "2", names=names), tmp_path / "new"
    damage_journal(old / "workers" / "1" / "1", record=-4)
    done = salvage(old, new, "--json")
    assert (done.code, losses_of(done)) == (1, {names[1]: 1})
    with ServerProcess(new, args=("--workers", "2"), env=UNSEALED) as server:
        assert entries_in(server, names[0]) == [line(number) for number in range(20)]
        assert len(entries_in(server, names[1])) == 19


def test_what_is_refused(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "old", env=UNSEALED).start()
    running = tailrace("salvage", str(server.data_dir), str(tmp_path / "new"))
    assert (running.code, "a server is running" in running.err) == (1, True)
    server.kill()
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_bytes(b"something")
    done = salvage(server.data_dir, taken)
    assert (done.code, "is not empty" in done.err) == (1, True)
    assert list(taken.iterdir()) == [taken / "file"]
    inside = salvage(server.data_dir, server.data_dir / "new")
    assert (inside.code, "is inside" in inside.err) == (1, True)
    nowhere = tailrace("salvage", str(tmp_path / "nowhere"), str(tmp_path / "new"))
    assert (nowhere.code, "not found" in nowhere.err) == (1, True)


@pytest.mark.parametrize("flags", [(), ("--help",)])
def test_without_arguments_or_with_help_it_explains_itself(flags: tuple[str, ...]) -> None:
    done = tailrace("salvage", *flags)
    assert done.code == (0 if flags else 2)
    assert "OLD" in done.out + done.err


@pytest.mark.parametrize("place", ["journal", "hot store"])
def test_history_in_a_bucket_goes_on_behind_what_is_lost(tmp_path: Path, place: str) -> None:
    old, new, args = tmp_path / "old", tmp_path / "new", ("--object-store", (tmp_path / "bucket").as_uri())
    server = ServerProcess(old, args=args, env=SEALING_ENV).start()
    call = Caller(server)
    assert call("PUT", "orders", headers=TEXT).status == 201
    for number in range(10):
        assert call("POST", "orders", line(number), headers=TEXT).status == 204
    wait_sealed(old)
    server.stop()
    env = {**UNSEALED, "TAILRACE_JOURNAL_FILE_BYTES": "64KiB" if place == "hot store" else "2MiB"}
    server = ServerProcess(old, args=args, env=env).start()
    call = Caller(server)
    for number in range(10, 40):
        assert call("POST", "orders", line(number, 12_000), headers=TEXT).status == 204
    if place == "hot store":
        eventually(lambda: unsealed_blocks(old), lambda count: count > 0)
    server.kill()
    if place == "journal":
        damage_journal(old, record=-9)
    else:
        with closing(sqlite3.connect(old / "hot.db")) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        data = (old / "hot.db").read_bytes()
        pages = [data[at : at + PAGE_BYTES] for at in range(0, len(data), PAGE_BYTES)]
        payload = [number for number, page in enumerate(pages) if page.count(b"x") > PAGE_BYTES - 100]
        for page in payload[len(payload) // 2 : len(payload) // 2 + 2]:
            overwrite_page(old / "hot.db", page)
    done = salvage(old, new, "--json")
    assert done.code == 1, done.out
    lost = losses_of(done)["orders"]
    expected = [line(number) for number in range(10)] + [line(number, 12_000) for number in range(10, 40)]
    with ServerProcess(new, args=args, env=SEALING_ENV) as server:
        found = entries_in(server, "orders")
        assert found == [one for one in expected if one in found]
        assert len(found) == 40 - lost
        assert Caller(server)("POST", "orders", b"more\n", headers=TEXT).status == 204
        wait_sealed(new)
        assert entries_in(server, "orders") == [*found, b"more\n"]
        assert "conflict" not in server.log
        server.kill()
    assert tailrace("verify", "--data-dir", str(new), *args).code == 0
    with ServerProcess(tmp_path / "restored", args=(*args, "--bootstrap"), env=SEALING_ENV) as server:
        assert entries_in(server, "orders") == [*found, b"more\n"]
