"""`tailrace hub` as an operator uses it."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from support.calls import eventually
from support.cli import Finished, command, environment, tailrace
from support.hub_clients import WAIT_S, fresh_address, next_of
from support.server import ServerProcess
from tailrace.client.hub import Hub


@pytest.fixture
def actor(server: ServerProcess) -> Iterator[Hub]:
    with Hub(server.base_url, address=fresh_address("cli")) as hub:
        hub.register(capabilities=["cli"])
        yield hub


def run(server: ServerProcess, *args: str) -> Finished:
    return tailrace("hub", *args, env={"TAILRACE_ENDPOINT": server.base_url})


def test_actors_are_listed(server: ServerProcess, actor: Hub) -> None:
    shown = run(server, "ls", actor.identity)
    assert (shown.code, shown.err) == (0, "")
    assert actor.identity in shown.out
    (row,) = run(server, "ls", "*", "--capability", "cli", "--json").rows
    assert (row["address"], row["online"]) == (actor.identity, True)
    nobody = run(server, "ls", "@(nobody)")
    assert (nobody.out, nobody.err) == ("", "no actors\n")


def test_a_message_is_sent_and_a_question_is_answered(server: ServerProcess, actor: Hub) -> None:
    sent = run(server, "send", actor.identity, "note", "plain words", "--as", "@(cli/me)", "--json")
    assert sent.rows[0]["status"] == "delivered"
    note = next_of(actor)
    assert (note.sender, note.type, note.data) == ("@(cli/me)", "note", "plain words")

    def answer() -> None:
        question = next_of(actor)
        actor.reply(question, "part", final=False)
        actor.reply(question, {"n": question.data["n"] + 1})

    answering = threading.Thread(target=answer)
    answering.start()
    asked = run(server, "ask", actor.identity, "count", '{"n": 1}')
    answering.join()
    assert asked.rows == ["part", {"n": 2}]


def test_failures_have_codes(server: ServerProcess) -> None:
    refused = run(server, "send", "@(nobody)", "x", "--json")
    assert refused.code == 1
    assert json.loads(refused.err)["error"]["code"] == "unknown_actor"
    assert run(server, "send", "nobody", "x").code == 1
    nowhere = tailrace("hub", "ls", "--url", "http://127.0.0.1:9")
    assert nowhere.code == 4
    assert tailrace("hub", "ls", "--url", "ftp://nonsense").code == 2


def test_a_topic_is_followed(server: ServerProcess, actor: Hub) -> None:
    topic = f"cli/{actor.session_id}"
    with subprocess.Popen(
        command("hub", "sub", f"{topic}/#", "--count", "2", "--json", "--url", server.base_url),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as following:
        assert following.stderr is not None
        assert following.stderr.readline() == f"listening to {topic}/#\n"
        for number in range(2):
            assert actor.publish(f"{topic}/{number}", "t", number).subscriber_count == 1
        out, _ = following.communicate(timeout=WAIT_S)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["data"], row["metadata"]["topic"]) for row in rows] == [(0, f"{topic}/0"), (1, f"{topic}/1")]


def test_mailboxes_are_shown_followed_committed_and_replayed(server: ServerProcess, actor: Hub) -> None:
    address = fresh_address("box")
    with Hub(server.base_url, address=address) as owner:
        owner.register(durable=True, commit="manual")
    for number in range(2):
        assert run(server, "send", address, "task", str(number), "--ack", "accepted").code == 0
    rows = run(server, "mailbox", address, "--json").rows
    assert [row["message"]["payload"] for row in rows] == [0, 1]
    assert run(server, "mailbox", address).err.startswith("2 uncommitted")
    followed = run(server, "tail", address, "--from-start", "--count", "2", "--json")
    assert [row["payload"] for row in followed.rows] == [0, 1]
    replayed = run(server, "replay", address, "--to", actor.identity, "--json")
    assert [row["status"] for row in replayed.rows] == ["accepted"] * 2
    copies = [next_of(actor) for _ in range(2)]
    assert [copy.data for copy in copies] == [0, 1]
    assert copies[0].metadata["replayedFrom"]["offset"] == rows[0]["offset"]
    assert run(server, "replay", address, "--to", address).code == 2
    committed = run(server, "mailbox", address, "--commit", rows[1]["offset"])
    assert (committed.out, committed.err.split()[0]) == ("", "0")


def test_dead_letters_are_shown_and_sent_again(server: ServerProcess, actor: Hub) -> None:
    gone = fresh_address("gone")
    actor.send(gone, "lost", {"n": 1})

    def letters() -> list[Any]:
        return run(server, "dead-letters", "--to", gone, "--json").rows

    eventually(letters, lambda found: len(found) == 1)
    (letter,) = letters()
    assert (letter["reason"], letter["message"]["payload"]) == ("unknown_actor", {"n": 1})
    none = run(server, "dead-letters", "--reason", "rejected", "--to", gone)
    assert (none.out, none.err) == ("", "no dead letters\n")
    failed = run(server, "dead-letters", "--to", gone, "--replay")
    assert (failed.code, "unknown_actor" in failed.err) == (1, True)
    with Hub(server.base_url, address=gone) as found:
        found.register()
        assert run(server, "dead-letters", "--to", gone, "--limit", "1", "--replay").code == 0
        message = next_of(found)
    assert message.data == {"n": 1}
    assert message.metadata["replayedFrom"]["id"] == letter["id"]


def test_an_actor_is_kicked(server: ServerProcess, actor: Hub) -> None:
    assert run(server, "kick", actor.identity).code == 0
    assert run(server, "ls", actor.identity).err == "no actors\n"
    again = run(server, "kick", actor.identity)
    assert (again.code, "unknown_actor" in again.err) == (1, True)


@pytest.mark.parametrize("data", ["{", '{"n": 1', "[1, 2", '"open', '{"n": NaN}'])
def test_data_that_begins_like_json_and_is_not_is_refused(
    actor: Hub, server: ServerProcess, data: str
) -> None:
    for verb in ("send", "ask"):
        refused = run(server, verb, actor.identity, "note", data)
        assert (refused.code, refused.out) == (2, ""), refused
        assert "data is not valid JSON" in refused.err
        assert json.dumps(data) in refused.err, "it says how to send this as text"
    sent = run(server, "send", actor.identity, "note", json.dumps(data))
    assert sent.code == 0
    assert next_of(actor).data == data, "nothing was sent before"


@pytest.mark.parametrize(("data", "sent"), [("12", 12), ("12 apples", "12 apples"), ("null", None)])
def test_data_that_is_no_json_is_text(actor: Hub, server: ServerProcess, data: str, sent: Any) -> None:
    assert run(server, "send", actor.identity, "note", data).code == 0
    assert next_of(actor).data == sent


def test_a_mailbox_that_is_not_there_is_not_shown_as_an_empty_one(server: ServerProcess) -> None:
    address = fresh_address("none")
    shown = run(server, "mailbox", address)
    assert (shown.code, shown.out, shown.err) == (0, "", f"no mailbox of {address}\n")
    assert run(server, "mailbox", address, "--json").rows == []


def test_looking_into_a_mailbox_leaves_its_owner_connected(server: ServerProcess) -> None:
    address = fresh_address("owner")
    with Hub(server.base_url, address=address) as owner:
        owner.register(durable=True)
        session = owner.session_id
        assert run(server, "mailbox", address).err.startswith("0 uncommitted")
        owner.send(address, "self", 1, ack="accepted")
        assert next_of(owner).data == 1
        assert owner.session_id == session
