"""The command line against a real server: what it prints, and the exit codes scripts rely on."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from conftest import StartServer
from support.calls import Caller
from support.cli import Finished, command, environment, tailrace
from support.server import ServerProcess
from tailrace.auth import create_token

_numbers = itertools.count(1)
VERBS = (
    "serve",
    "append",
    "read",
    "tail",
    "ls",
    "profile",
    "details",
    "inspect",
    "verify",
    "gc",
    "doctor",
    "token",
)


@pytest.fixture
def name() -> str:
    return f"cli/stream-{next(_numbers)}"


def _on(server: ServerProcess, *args: str, stdin: bytes = b"") -> Finished:
    return tailrace(*args, stdin=stdin, env={"TAILRACE_ENDPOINT": server.base_url})


def test_appends_and_reads_json_messages(server: ServerProcess, name: str) -> None:
    created = _on(server, "append", name, '{"id": 1}', "[2, 3]", "--create", "--json")
    assert created.code == 0, created.err
    assert created.rows[0]["entries"] == 2
    assert _on(server, "read", name).out == '{"id": 1}\n[2, 3]\n'
    (page,) = _on(server, "read", name, "--json").rows
    assert page["entries"] == [{"id": 1}, [2, 3]]
    assert page["next_offset"] == created.rows[0]["next_offset"]
    assert page["up_to_date"]


def test_reads_on_from_an_offset(server: ServerProcess, name: str) -> None:
    first = _on(server, "append", name, "1", "--create", "--json").rows[0]
    _on(server, "append", name, "2")
    assert _on(server, "read", name, "--offset", first["next_offset"]).out == "2\n"


def test_input_lines_are_messages(server: ServerProcess, name: str) -> None:
    lines = b"".join(json.dumps({"n": n}).encode() + b"\n" for n in range(2500)) + b"\n[9]"
    done = _on(server, "append", name, "--create", stdin=lines)
    assert done.out.startswith("appended 2,501 entries"), done.err
    messages = [json.loads(line) for line in _on(server, "read", name).out.splitlines()]
    assert messages == [*({"n": n} for n in range(2500)), [9]]


def test_a_producer_keeps_arrays_and_order(server: ServerProcess, name: str) -> None:
    done = _on(server, "append", name, "--create", "--producer", "import", stdin=b"1\n[2, 3]\n4\n")
    assert done.code == 0, done.err
    again = _on(server, "append", name, "--producer", "import", stdin=b"5\n")
    assert again.code == 0, again.err
    assert _on(server, "read", name).out == "1\n[2, 3]\n4\n5\n"


def test_bytes_pass_through_unchanged(server: ServerProcess, name: str) -> None:
    payload = bytes(range(256)) * 5000
    binary = ("--create", "--content-type", "application/octet-stream")
    done = _on(server, "append", name, *binary, stdin=payload)
    assert done.code == 0, done.err
    assert _on(server, "read", name).raw == payload
    rows = _on(server, "read", name, "--json").rows
    assert rows[0]["content_type"] == "application/octet-stream"
    assert all("base64" in row for row in rows)


def test_text_lines_keep_their_ends(server: ServerProcess, name: str) -> None:
    text = ("--create", "--content-type", "text/plain", "--lines", "--close", "--json")
    done = _on(server, "append", name, *text, stdin=b"one\n\ntwo\n")
    assert (done.rows[0]["entries"], done.rows[0]["closed"]) == (3, True)
    assert _on(server, "read", name).out == "one\n\ntwo\n"
    closed = _on(server, "append", name, "late")
    assert closed.code == 1
    assert "stream_closed" in closed.err


def test_the_last_line_needs_no_end_and_no_ink(server: ServerProcess, name: str) -> None:
    text = ("--lines", "--create", "--content-type", "text/plain")
    assert _on(server, "append", name, *text, stdin=b"a\n  ").code == 0
    assert _on(server, "read", name).out == "a\n  "


def test_half_a_character_passes_through(server: ServerProcess, name: str) -> None:
    cut, pretty = '{"a": "\\ud83d"}', '{"a":\n"\\ud83d", "n": 1e400}'
    appended = _on(server, "append", name, cut, pretty, "--create")
    assert appended.code == 0, appended.err
    assert _on(server, "read", name).out == f"{cut}\n{pretty}\n".replace(":\n", ": ")
    refused = _on(server, "append", name, '["\\ud83d", NaN]')
    assert (refused.code, "entry 1 is not JSON" in refused.err) == (2, True)


def test_a_token_that_only_writes_can_append(start_server: StartServer, name: str) -> None:
    secret = "a secret that is long enough for the server to accept it"
    server = start_server(env={"TAILRACE_AUTH_JWT_SECRET": secret})

    def run(scope: str, *args: str) -> Finished:
        token = create_token(secret, sub="cli", scopes=(scope,), lifetime_s=60)
        return tailrace(*args, env={"TAILRACE_ENDPOINT": server.base_url, "TAILRACE_TOKEN": token})

    for _ in range(2):
        created = run("write", "append", name, "1", "--create")
        assert created.code == 0, created.err
    assert run("write", "append", name, "2").code == 0
    assert run("manage", "read", name).out == "1\n1\n2\n"
    wrong = run("write", "append", name, "x", "--content-type", "text/plain")
    assert (wrong.code, "(content_type_mismatch)" in wrong.err) == (1, True)
    assert run("read", "append", name, "3").err == "tailrace: requires scope write (forbidden)\n"
    assert run("write", "tail", name).err == "tailrace: requires scope read (forbidden)\n"


def test_a_line_that_is_not_json_is_named_and_nothing_is_sent(server: ServerProcess, name: str) -> None:
    done = _on(server, "append", name, "--create", stdin=b'{"a": 1}\nnonsense\n')
    assert done.code == 2
    assert "entry 2 is not JSON" in done.err
    assert _on(server, "read", name).out == ""


@pytest.mark.parametrize("producer", [(), ("--producer", "import")])
def test_what_was_appended_before_a_line_that_is_not_json_is_told(
    server: ServerProcess, name: str, producer: tuple[str, ...]
) -> None:
    # More than one piece of input: what came before the piece with the fault is on disk by then.
    lines = b'"0123456789"\n' * 100_000 + b"nonsense\n1\n"
    done = _on(server, "append", name, "--create", *producer, stdin=lines)
    count = len(_on(server, "read", name).out.splitlines())
    assert (done.code, 0 < count <= 100_000) == (2, True), done.err
    assert "entry 100001 is not JSON" in done.err
    assert f"; {count:,} entries were appended before that: continue with entry {count + 1:,}" in done.err
    again = _on(server, "append", name, *producer, "--json", stdin=lines)
    assert json.loads(again.err)["error"]["appended"] == count


def test_what_was_appended_before_a_refusal_is_told(server: ServerProcess, name: str) -> None:
    call = Caller(server)
    assert call("PUT", name, headers={"Content-Type": "application/json"}).status == 201
    assert call("POST", f"{name}/_schema", {"schema": {"type": "object"}}).status == 200
    lines = b'{"n": "0123456789"}\n' * 60_000 + b"1\n"
    done = _on(server, "append", name, "--json", stdin=lines)
    count = len(_on(server, "read", name).out.splitlines())
    told = json.loads(done.err)["error"]
    assert (done.code, told["code"], 0 < count < 60_001) == (1, "invalid_request", True), told
    assert told["appended"] == count
    assert f"continue with entry {count + 1:,}" in told["message"]


@pytest.mark.parametrize(
    "verb", [("append", "1", "--create"), ("read",), ("key", "create", "--sub", "a", "--scope", "read")]
)
def test_output_that_is_lost_is_a_failure(
    server: ServerProcess, tmp_path: Path, name: str, verb: tuple[str, ...]
) -> None:
    # The key above all: nobody can show it again.
    _on(server, "append", name, "1", "--create")
    what = (*verb, "--file", str(tmp_path / "keys.json")) if verb[0] == "key" else (verb[0], name, *verb[1:])
    found = environment({"TAILRACE_ENDPOINT": server.base_url})
    del found["PYTHONUNBUFFERED"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command(*what), env=found, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    told = "tailrace: cannot write: No space left on device (unwritable)\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_lists_streams(server: ServerProcess) -> None:
    for last in ("b", "a"):
        _on(server, "append", f"cli-ls/{last}", "1", "2", "--create")
    rows = _on(server, "ls", "cli-ls/", "--json").rows
    assert [(row["name"], row["next_offset"]) for row in rows] == [("cli-ls/a", "2"), ("cli-ls/b", "2")]
    assert [row["name"] for row in _on(server, "ls", "cli-ls/", "--limit", "1", "--json").rows] == [
        "cli-ls/a"
    ]
    table = _on(server, "ls", "cli-ls/").out
    assert "cli-ls/a" in table
    assert "application/json" in table


@pytest.mark.parametrize("mode", ["sse", "long-poll"])
def test_tail_prints_what_is_appended_and_ends_with_the_stream(
    server: ServerProcess, name: str, mode: str
) -> None:
    _on(server, "append", name, '"before"', "--create")
    follow = command("tail", name, "--from-start", "--mode", mode, "--url", server.base_url)
    with subprocess.Popen(follow, stdout=subprocess.PIPE, env=environment()) as tail:
        assert tail.stdout is not None
        assert tail.stdout.readline() == b'"before"\n'
        _on(server, "append", name, '"after"', "--close")
        assert tail.stdout.readline() == b'"after"\n'
        assert tail.stdout.read() == b""
        assert tail.wait(30) == 0


def test_details_of_a_stream_and_of_the_server(server: ServerProcess) -> None:
    _on(server, "append", "cli-details", "1", "2", "--create")
    (shown,) = _on(server, "details", "cli-details", "--json").rows
    assert (shown["stream"]["name"], shown["stream"]["next_offset"]) == ("cli-details", "2")
    table = _on(server, "details", "cli-details").out
    assert "cli-details" in table
    assert "pending rows" in table
    (node,) = _on(server, "details", "--json").rows
    assert node["runtime"]["memory"]["last_rss_bytes"] > 0
    assert "resident" in _on(server, "details").out
    missing = tailrace("details", "cli-nothing", "--url", server.base_url)
    assert missing.code == 1
    assert "there is no stream" in missing.err


def test_profiles_are_shown_and_set(server: ServerProcess, name: str) -> None:
    _on(server, "append", name, "--create")
    assert '"kind": "generic"' in _on(server, "profile", "get", name).out
    (shown,) = _on(
        server, "profile", "set", name, "evlog", "--redact", "Card", "--redact", "pin", "--json"
    ).rows
    assert shown["profile"] == {"kind": "evlog", "redactKeys": ["card", "pin"]}
    refused = tailrace("profile", "set", name, "logs", "--url", server.base_url)
    assert refused.code == 1
    assert "profile.kind must be" in refused.err
    (shown,) = _on(server, "profile", "set", name, "state-protocol", "--touch", "--json").rows
    assert shown["profile"]["touch"]["enabled"] is True
    assert tailrace("profile", "set", name, "evlog", "--config", "[]", "--url", server.base_url).code == 2


def test_ctrl_c_ends_a_tail_quietly(server: ServerProcess, name: str) -> None:
    _on(server, "append", name, "1", "--create")
    follow = command("tail", name, "--from-start", "--url", server.base_url)
    pipe = subprocess.PIPE
    with subprocess.Popen(follow, stdout=pipe, stderr=pipe, env=environment()) as tail:
        assert tail.stdout is not None
        assert tail.stderr is not None
        assert tail.stdout.readline() == b"1\n"
        tail.send_signal(signal.SIGINT)
        assert tail.wait(30) == 0
        assert tail.stderr.read() == b""


def test_a_reader_that_leaves_is_no_error(server: ServerProcess, name: str) -> None:
    _on(server, "append", name, "--create", stdin=b"12345\n" * 100_000)
    read = command("read", name, "--url", server.base_url)
    with subprocess.Popen(read, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert os.read(process.stdout.fileno(), 6) == b"12345\n"
        process.stdout.close()
        assert process.wait(30) == 0
        assert process.stderr.read() == b""


def test_exit_codes_tell_refusals_usage_and_silence_apart(server: ServerProcess, tmp_path: Path) -> None:
    missing = _on(server, "read", "cli/nothing")
    assert (missing.code, missing.out) == (1, "")
    assert "not_found" in missing.err
    assert _on(server, "tail", "cli/nothing").code == 1
    assert "--create" in _on(server, "append", "cli/nothing", "1").err
    assert tailrace("read").code == 2
    assert tailrace("read", "x", "--nonsense").code == 2
    assert tailrace("nonsense").code == 2
    assert tailrace("ls", "--url", "ftp://nowhere").code == 2
    silent = tailrace("ls", "--url", "http://127.0.0.1:9")
    assert silent.code == 4
    assert "tailrace serve" in silent.err
    assert tailrace("inspect", "hot", "--data-dir", str(tmp_path / "none")).code == 1


@pytest.mark.parametrize(
    "args",
    [
        ("read", "orders/../secret"),
        ("append", "", "1"),
        ("search", "a/../b", "x"),
        ("docs", "rm", "default/orders/../users/u-1"),
        ("source", "rm", "default/.."),
    ],
)
def test_a_path_that_leads_elsewhere_is_refused(server: ServerProcess, args: tuple[str, ...]) -> None:
    refused = _on(server, *args)
    assert refused.code in (1, 2)
    assert "have '.' or '..' segments" in refused.err


@pytest.mark.parametrize(
    "args",
    [
        ("ls", "--limit", "-1"),
        ("ls", "--limit", "0"),
        ("append", "flags", "1", "--create", "--key", ""),
        ("append", "flags", "1", "--create", "--producer", ""),
        ("append", "flags", "1", "--create", "--content-type", ""),
        ("tail", "flags", "--from-start", "--offset", "now"),
    ],
)
def test_flags_that_make_no_sense_are_wrong_usage(server: ServerProcess, args: tuple[str, ...]) -> None:
    refused = _on(server, *args)
    assert (refused.code, "(usage)" in refused.err) == (2, True), refused.err


def test_an_address_or_a_token_that_cannot_be_is_told(server: ServerProcess) -> None:
    for args in (("ls",), ("details",), ("docs", "get", "default/a/b")):
        wrong = tailrace(*args, "--url", "http://[::1")
        assert (wrong.code, "must be a URL" in wrong.err) == (2, True), wrong.err
        secret = tailrace(*args, "--url", server.base_url, env={"TAILRACE_TOKEN": "hush\nhush"})
        assert secret.code == 2
        assert "the token must be printable ASCII without spaces" in secret.err
        assert "hush" not in secret.err
    assert _on(server, "seal", "--url", f"{server.base_url}/").code == 0


def test_a_refusal_has_the_code_of_the_server(server: ServerProcess) -> None:
    assert _on(server, "tail", "nothing").err == "tailrace: stream 'nothing' not found (not_found)\n"
    assert "(not_found)" in _on(server, "details", "nothing").err
    _on(server, "docs", "put", "default/clicodes/a", "{}")
    refused = _on(server, "docs", "put", "default/clicodes/a", "{}", "--if-version", "7", "--json")
    error = json.loads(refused.err)["error"]
    assert (error["code"], error["current_version"]) == ("version_mismatch", 1)


def test_a_query_tells_that_there_is_more(server: ServerProcess) -> None:
    for number in range(3):
        _on(server, "docs", "put", f"default/climore/d{number}", "{}")
    some = _on(server, "docs", "query", "default/climore", "--limit", "2")
    assert (len(some.rows), some.err) == (2, "more than 2 documents match; --limit can be up to 1,000\n")
    assert _on(server, "docs", "query", "default/climore", "--limit", "3").err == ""


def test_errors_are_json_when_output_is(server: ServerProcess) -> None:
    done = _on(server, "read", "cli/nothing", "--json")
    assert json.loads(done.err)["error"]["code"] == "not_found"


def test_serve_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    data = ("--data-dir", str(tmp_path / "data"))
    assert tailrace("serve", "--port", "many", *data).code == 2
    open_door = tailrace("serve", "--host", "0.0.0.0", "--port", "0", *data)
    assert open_door.code == 1
    assert "--insecure" in open_door.err
    assert not (tmp_path / "data").exists(), "a refused start leaves nothing behind"


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (("ls", "nothing/begins/like/this"), "streams"),
        (("key", "list", "--file", "keys.json"), "keys"),
        (("source", "ls", "default"), "sources"),
        (("docs", "query", "default/nobodys"), "documents"),
    ],
)
def test_an_empty_list_is_told_beside_the_output(
    server: ServerProcess, tmp_path: Path, args: tuple[str, ...], what: str
) -> None:
    env = {"TAILRACE_ENDPOINT": server.base_url}
    shown = tailrace(*args, env=env, cwd=tmp_path)
    assert (shown.code, shown.out, shown.err) == (0, "", f"no {what}\n")
    as_json = tailrace(*args, "--json", env=env, cwd=tmp_path)
    assert (as_json.code, as_json.out, as_json.err) == (0, "", "")


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--upstream", "ftp://somewhere"),
        ("--upstream", "http://127.0.0.1:1,http://127.0.0.1:1"),
        ("--upstream", "http://127.0.0.1:1,http://127.0.0.1:2"),
    ],
)
def test_an_edge_without_a_good_upstream_is_wrong_usage(args: tuple[str, ...]) -> None:
    done = tailrace("edge", *args)
    assert (done.code, done.out) == (2, "")
    assert "upstream" in done.err
    assert done.err.endswith("(usage)\n")


@pytest.mark.parametrize("content", [b"", b"PAR1 and nothing else", b"PAR1" * 100])
def test_a_file_that_is_no_segment_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.parquet"
    path.write_bytes(content)
    for flags in ((), ("--json",), ("--entries",)):
        done = tailrace("inspect", "segment", str(path), *flags)
        assert done.code == 1
        assert "problem" in done.out
        assert "is not a valid segment" in done.err


def test_inspects_what_a_server_wrote(server: ServerProcess, name: str) -> None:
    _on(server, "append", name, '{"seen": "in the journal"}', "--create")
    directory = str(server.data_dir)
    records = tailrace("inspect", "journal", "--data-dir", directory, "--json")
    assert records.code == 0, records.err
    assert name in records.out
    assert name in tailrace("inspect", "journal", env={"TAILRACE_DATA_DIR": directory}).out
    hot = tailrace("inspect", "hot", "--data-dir", directory, "--json")
    assert hot.code == 0, hot.err
    assert isinstance(hot.rows[0], dict)


def test_doctor_finds_a_fit_machine_and_a_running_server(server: ServerProcess, tmp_path: Path) -> None:
    fit = tailrace("doctor", "--port", "0", "--data-dir", str(tmp_path / "data"), "--json")
    verdicts = {row["check"]: row["verdict"] for row in fit.rows}
    assert fit.code == 0, fit.out
    assert "fail" not in verdicts.values()
    assert verdicts["fsync"] in {"ok", "warn"}
    assert not (tmp_path / "data").exists(), "looking changes nothing"
    taken = tailrace("doctor", "--port", str(server.port), "--data-dir", str(server.data_dir), "--json")
    verdicts = {row["check"]: row["verdict"] for row in taken.rows}
    assert taken.code == 1
    assert (verdicts["port"], verdicts["lock"]) == ("fail", "warn")


def test_tokens_are_made_and_read(tmp_path: Path) -> None:
    secret = {"TAILRACE_AUTH_JWT_SECRET": "0123456789abcdef0123456789abcdef"}
    grant = ("--sub", "ci", "--scope", "write", "--streams", "builds/", "--expires", "8h")
    made = tailrace("token", "create", *grant, env=secret)
    assert made.code == 0, made.err
    read = tailrace("token", "inspect", made.out.strip(), "--json")
    assert read.code == 0
    assert (read.rows[0]["claims"]["sub"], read.rows[0]["scopes"]) == ("ci", ["write"])
    assert read.rows[0]["streams"] == ["builds/"]
    assert tailrace("token", "create", *grant).code == 2
    assert tailrace("token", "create", "--sub", "a", "--scope", "fly", env=secret).code == 1
    assert tailrace("token", "inspect", "nonsense").code == 1


@pytest.mark.parametrize("verb", VERBS)
def test_help_explains_every_verb_with_an_example(verb: str) -> None:
    done = tailrace(verb, "--help")
    assert done.code == 0
    assert f"tailrace {verb}" in done.out.split("For example:")[1]


def test_help_loads_no_command() -> None:
    program = (
        "import sys; from tailrace.cli.app import build; build(['--help']); "
        "print([name for name in sys.modules if name.startswith(('httpx2', 'uvloop', 'tailrace.client'))])"
    )
    done = subprocess.run([command()[0], "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    listed = tailrace("--help").out
    assert [verb for verb in VERBS if f" {verb} " not in listed] == []


_ADD = ("source", "add", "default/pg", "--table", "a.b=c", "--dsn-env", "PG_DSN")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((*_ADD, "--on-gap", "wait"), '"wait" for --on-gap. Choose from: "rescan", "hold"'),
        ((*_ADD, "--initial", "all"), '"all" for --initial. Choose from: "load", "now"'),
        ((*_ADD, "--numeric", "int"), '"int" for --numeric. Choose from: "string", "double"'),
        (("tail", "x", "--mode", "poll"), '"poll" for --mode. Choose from: "sse", "long-poll"'),
        (("pipeline", "rescan", "--collection", "x", "--from", "view"), 'for --from. Choose from: "log"'),
        (
            ("docs", "query", "default/x", "--order", "a:up"),
            "--order: 'a:up' must be a field, optionally with :asc or",
        ),
        (("gc", "--grace", "soon"), "--grace: 'soon' is not a whole number (units: ms, s, m, h, d)"),
        (("pipeline", "run", "--heap", "big"), "--heap: 'big' is not a whole number (units: b, kb"),
        (("pipeline", "run", "--jobs", "all,dig"), "--jobs: 'all' is not a job: use companions, merge"),
        (("aggregate", "s", "r", "--interval", "1m", "--from", "dawn"), "--from: 'dawn' is not a time"),
        (("hub", "dead-letters", "--since", "dawn"), "--since: 'dawn' is not a time"),
        (("serve", "--log-level", "loud"), "--log-level: use one of debug, info, warning, error"),
    ],
)
def test_an_error_names_the_flag_and_what_it_takes(
    server: ServerProcess, args: tuple[str, ...], told: str
) -> None:
    wrong = _on(server, *args)
    assert (wrong.code, wrong.out, told in wrong.err) == (2, "", True), wrong.err
