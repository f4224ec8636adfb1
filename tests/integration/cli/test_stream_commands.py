"""The commands that make, read and end streams, as a person and as a script run them."""

from __future__ import annotations

import itertools
import json
import subprocess
import time
from pathlib import Path

import pytest

from support.calls import Caller, eventually
from support.cli import Finished, command, environment, tailrace
from support.server import ServerProcess
from support.terminal import OnTerminal
from tailrace.cli.read import entries_before
from tailrace.protocol.offsets import encode_offset

_numbers = itertools.count(1)


@pytest.fixture
def name() -> str:
    return f"cli-streams/{next(_numbers)}"


def _on(server: ServerProcess, *args: str, stdin: bytes = b"") -> Finished:
    return tailrace(*args, stdin=stdin, env={"TAILRACE_URL": server.base_url})


def _done(server: ServerProcess, *args: str, stdin: bytes = b"") -> Finished:
    done = _on(server, *args, stdin=stdin)
    assert done.code == 0, done.err
    return done


def _exists(server: ServerProcess, name: str) -> bool:
    return Caller(server)("HEAD", name).status == 200


# -- create ------------------------------------------------------------------------------------------------


def test_creates_a_stream_with_its_bounds(server: ServerProcess, name: str) -> None:
    bounds = ("--ttl", "8h", "--retention", "30d", "--retention-bytes", "10GiB", "--type", "text/plain")
    assert _done(server, "create", name, *bounds).out == f"created {name} (text/plain)\n"
    headers = Caller(server)("HEAD", name).headers
    assert headers["content-type"] == "text/plain"
    assert headers["stream-ttl"] == str(8 * 3600)
    assert headers["stream-retention"] == str(30 * 86_400)
    assert headers["stream-retention-bytes"] == str(10 << 30)
    again = _done(server, "create", name, *bounds, "--json").rows[0]
    assert (again["stream"], again["created"]) == (name, False)


def test_creates_a_stream_with_a_profile(server: ServerProcess, name: str) -> None:
    _done(server, "create", name, "--profile", "evlog")
    assert json.loads(_done(server, "profile", "get", name).out)["profile"]["kind"] == "evlog"


def test_another_configuration_is_refused(server: ServerProcess, name: str) -> None:
    _done(server, "create", name)
    other = _on(server, "create", name, "--type", "text/plain")
    assert (other.code, other.out) == (1, "")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--ttl", "soon"), "--ttl: 'soon' is not a duration such as 90s, 30m, 8h or 90d"),
        (("--retention", "1y"), "--retention: '1y' is not a duration"),
        (("--retention-bytes", "much"), "--retention-bytes: 'much' is not a whole number (units: b, kb,"),
        (("--expires-at", "1h"), "--expires-at: '1h' is not an RFC 3339 time"),
        (("--ttl", "1h", "--expires-at", "2030-01-01T00:00:00Z"), "use either --ttl or --expires-at"),
        (("--profile", "logs"), '"generic", "evlog", "metrics", "otel-traces", "state-protocol"'),
    ],
)
def test_an_error_names_the_flag_and_the_choices(
    server: ServerProcess, name: str, args: tuple[str, ...], told: str
) -> None:
    wrong = _on(server, "create", name, *args)
    assert (wrong.code, told in wrong.err) == (2, True), wrong.err
    assert not _exists(server, name)


# -- fork and close ----------------------------------------------------------------------------------------


def test_a_fork_begins_with_its_source_up_to_an_offset(server: ServerProcess, name: str) -> None:
    first = _done(server, "append", name, "1", "--create", "--json").rows[0]["next_offset"]
    last = _done(server, "append", name, "2", "--json").rows[0]["next_offset"]
    assert _done(server, "fork", name, f"{name}-all").out.endswith(f"to {name}-all, next offset {last}\n")
    part = _done(server, "fork", name, f"{name}-part", "--offset", first, "--ttl", "1h", "--json").rows[0]
    assert part == {"stream": f"{name}-part", "source": name, "next_offset": first}
    assert _done(server, "read", f"{name}-all").out == "1\n2\n"
    assert _done(server, "read", f"{name}-part").out == "1\n"
    assert Caller(server)("HEAD", f"{name}-part").headers["stream-ttl"] == "3600"


def test_a_closed_stream_takes_nothing(server: ServerProcess, name: str) -> None:
    offset = _done(server, "append", name, "1", "--create", "--json").rows[0]["next_offset"]
    assert _done(server, "close", name).out == f"closed {name}, final offset {offset}\n"
    again = {"stream": name, "closed": True, "next_offset": offset}
    assert _done(server, "close", name, "--json").rows == [again]
    assert "(stream_closed)" in _on(server, "append", name, "2").err


# -- rm ----------------------------------------------------------------------------------------------------


def test_a_script_deletes_with_yes_only(server: ServerProcess, name: str) -> None:
    _done(server, "create", name)
    refused = _on(server, "rm", name)
    assert (refused.code, "pass --yes" in refused.err) == (2, True), refused.err
    assert _exists(server, name)
    assert _done(server, "rm", name, "--yes").out == f"deleted {name}\n"
    assert not _exists(server, name)


def test_what_cannot_be_deleted_does_not_keep_the_others(server: ServerProcess, name: str) -> None:
    _done(server, "create", name)
    some = _on(server, "rm", f"{name}-none", name, "--yes", "--json")
    assert (some.code, some.rows) == (1, [{"stream": name, "deleted": True}])
    assert json.loads(some.err)["error"]["code"] == "not_found"


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("\n", 1), ("\x03", 130)])
def test_a_person_is_asked(server: ServerProcess, name: str, answer: str, code: int) -> None:
    _done(server, "create", name)
    env = environment({"TAILRACE_URL": server.base_url})
    with OnTerminal(command("rm", name), env=env) as screen:
        screen.wait_for(f"Delete stream {name} and all entries? [y/N] ")
        screen.type(answer)
        assert screen.wait_end() == code
        assert "Traceback" not in screen.shown
    assert _exists(server, name) is (code != 0)


# -- read and tail -----------------------------------------------------------------------------------------


def test_reads_at_most_so_many(server: ServerProcess, name: str) -> None:
    _done(server, "append", name, "--create", stdin=b"".join(b"%d\n" % n for n in range(25_000)))
    for limit in (1, 7, 10_000, 12_345):
        lines = _done(server, "read", name, "--limit", str(limit)).out.splitlines()
        assert lines == [str(n) for n in range(limit)]
    assert len(_done(server, "read", name, "-n", "30000").out.splitlines()) == 25_000
    assert _on(server, "read", name, "--limit", "0").code == 2


def test_a_limited_read_says_where_to_go_on(server: ServerProcess, name: str) -> None:
    _done(server, "append", name, "--create", stdin=b"".join(b"%d\n" % n for n in range(20)))
    (page,) = _done(server, "read", name, "--limit", "7", "--json").rows
    assert (page["entries"], page["up_to_date"]) == (list(range(7)), False)
    rest = _done(server, "read", name, "--offset", page["next_offset"], "--limit", "99", "--json").rows
    assert [one for page in rest for one in page["entries"]] == list(range(7, 20))
    assert rest[-1]["up_to_date"]


def test_a_limit_counts_entries_that_match(server: ServerProcess, name: str) -> None:
    _done(server, "create", name)
    for number in range(6):
        _done(server, "append", name, str(number), "--key", "odd" if number % 2 else "even")
    assert _done(server, "read", name, "--key", "odd", "--limit", "2").out == "1\n3\n"


def test_a_limit_needs_entries_that_can_be_told_apart(server: ServerProcess, name: str) -> None:
    _done(server, "append", name, "one", "--create", "--content-type", "text/plain")
    refused = _on(server, "read", name, "--limit", "1")
    assert (refused.code, "application/json" in refused.err) == (1, True), refused.err


@pytest.mark.parametrize("verb", ["read", "tail"])
def test_since_takes_a_span_back_from_now(server: ServerProcess, name: str, verb: str) -> None:
    call = Caller(server)
    assert call("PUT", name, headers={"Content-Type": "application/json"}).status == 201
    two_hours_ago = str(time.time_ns() - 7200 * 10**9)
    old = {"Content-Type": "application/json", "Stream-Timestamp": two_hours_ago}
    assert call("POST", name, "old", headers=old).status == 204
    _done(server, "append", name, '"new"', "--close")
    assert _done(server, verb, name, "--since", "1h").out == '"new"\n'
    assert _done(server, verb, name, "--since", "3h").out == '"old"\n"new"\n'
    wrong = _on(server, verb, name, "--since", "yesterday")
    assert (wrong.code, "--since: 'yesterday' is not a time: use RFC 3339" in wrong.err) == (2, True)


@pytest.mark.parametrize(("count", "expected"), [("0", ""), ("2", "8\n9\n"), ("99", None)])
def test_tail_begins_with_the_last_entries(
    server: ServerProcess, name: str, count: str, expected: str | None
) -> None:
    _done(server, "append", name, "--create", stdin=b"".join(b"%d\n" % n for n in range(10)))
    everything = "".join(f"{n}\n" for n in range(10))
    follow = command("tail", name, "-n", count, "--url", server.base_url)
    with subprocess.Popen(follow, stdout=subprocess.PIPE, env=environment(), text=True) as tail:
        assert tail.stdout is not None
        wanted = everything if expected is None else expected
        assert tail.stdout.read(len(wanted)) == wanted
        if not wanted:
            _until_followed(server)
        _done(server, "append", name, '"after"', "--close")
        assert tail.stdout.read() == '"after"\n'
        assert tail.wait(60) == 0


def _until_followed(server: ServerProcess) -> None:
    """Until a live reader is there: what is appended later reaches it."""

    def live() -> float:
        lines = Caller(server)("GET", "/metrics").raw.decode().splitlines()
        (found,) = [line for line in lines if line.startswith('tailrace_live_connections{mode="sse"}')]
        return float(found.rsplit(" ", 1)[1])

    eventually(live, lambda count: count > 0)


def test_tail_of_bytes_begins_with_the_last_entries(server: ServerProcess, name: str) -> None:
    text = ("--create", "--content-type", "text/plain", "--lines", "--close")
    _done(server, "append", name, *text, stdin=b"one\ntwo\nthree\n")
    assert _done(server, "tail", name, "-n", "2").out == "two\nthree\n"


def test_the_last_entries_begin_where_retention_has_left_off() -> None:
    assert entries_before(encode_offset(0, 100), 3) == encode_offset(0, 97)
    assert entries_before(encode_offset(0, 100), 3, encode_offset(0, 99)) == encode_offset(0, 99)
    assert entries_before(encode_offset(2, 100), 300, encode_offset(2, 0)) == encode_offset(2, 0)


@pytest.mark.parametrize(
    "args",
    [
        ("-n", "5", "--from-start"),
        ("-n", "5", "--offset", "now"),
        ("-n", "5", "--since", "1h"),
        ("-n", "5", "--key", "a"),
        ("-n", "5", "--filter", "a:1"),
        ("-n", "-1"),
    ],
)
def test_tail_refuses_two_beginnings(server: ServerProcess, name: str, args: tuple[str, ...]) -> None:
    _done(server, "create", name)
    refused = _on(server, "tail", name, *args)
    assert (refused.code, "-n" in refused.err) == (2, True), refused.err


# -- append, as a person sees it ---------------------------------------------------------------------------


def test_progress_is_shown_on_a_terminal_and_nowhere_else(
    server: ServerProcess, name: str, tmp_path: Path
) -> None:
    file = tmp_path / "orders.ndjson"
    file.write_bytes(b'{"id": 1}\n' * 300_000)
    _done(server, "create", name)
    shell = f"{' '.join(command('append', name))} < {file}"
    env = environment({"TAILRACE_URL": server.base_url})
    with OnTerminal(["bash", "-c", shell], env=env) as screen:
        assert screen.wait_end() == 0, screen.shown
        assert "%" in screen.shown
        assert "300,000 entries" in screen.shown
    piped = subprocess.run(["bash", "-c", shell], env=env, capture_output=True, text=True, check=True)
    assert piped.stderr == ""
    assert piped.stdout.startswith("appended 300,000 entries")
