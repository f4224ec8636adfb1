"""Sender identity is decided and written in `hub/sender_identity.py` only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.hub import sender_identity as sender
from tailrace.hub.policy import Principal
from tailrace.hub.session import Session

HUB = Path(sender.__file__).parent
ENCODERS = frozenset(("encode_envelope", "encode_shared"))
# `"from":""` measures the fixed part of an incoming frame, and writes nothing.
WRITTEN = re.compile(r'"(?:from|originalFrom)":(?!"")')
# Classes and descriptions with a member `from` that are decoded, or hold the address of a Sender.
DECLARED = {
    "dead_letters.py": {"DeadLetter"},
    "fast_path.py": {"PlainSend"},
    "routes.py": {"_RequestHead", "_HUB_MESSAGE", "_HUB_REPLY"},
}
PLAIN = [
    path.name for path in sorted(HUB.glob("*.py")) if path.name not in ("sender_identity.py", "envelope.py")
]


def violations(text: str, declared: set[str]) -> Iterator[str]:
    tree = ast.parse(text)
    allowed = {
        id(node)
        for found in ast.walk(tree)
        if (isinstance(found, ast.ClassDef) and found.name in declared)
        or (isinstance(found, ast.AnnAssign) and ast.unparse(found.target) in declared)
        for node in ast.walk(found)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
            value = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
            if WRITTEN.search(value):
                yield f"line {node.lineno} writes {value!r}"
        elif isinstance(node, (ast.Dict, ast.keyword, ast.Subscript)) and id(node) not in allowed:
            keys = node.keys if isinstance(node, ast.Dict) else [getattr(node, "slice", None)]
            keys = [node.value] if isinstance(node, ast.keyword) and node.arg == "name" else keys
            if any(isinstance(key, ast.Constant) and key.value == "from" for key in keys):
                yield f"line {node.lineno} has a member `from`"
        elif isinstance(node, ast.alias) and node.name in ENCODERS:
            yield f"line {node.lineno} imports {node.name}"
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if called in ENCODERS or called == "Sender":
                yield f"line {node.lineno} calls {called}"


@pytest.mark.parametrize("name", PLAIN)
def test_no_other_module_writes_from(name: str) -> None:
    assert list(violations((HUB / name).read_text(), DECLARED.get(name, set()))) == []


@pytest.mark.parametrize(
    "line",
    [
        "frame = encode_envelope(from_=claimed)",
        "from tailrace.hub.envelope import encode_shared",
        "frame = b'{\"from\":%b}' % claimed",
        "own = f'\"originalFrom\":{claimed}'",
        'message = {"from": claimed}',
        'message["from"] = claimed',
        'sender: str = msgspec.field(name="from")',
        "sender = Sender(claimed, claimed, b'')",
        "sender = hub.sender.Sender(claimed, claimed, b'')",
    ],
)
def test_a_second_place_is_noticed(line: str) -> None:
    assert list(violations(line, set()))


class Counts:
    def __init__(self) -> None:
        self.names: list[str] = []

    def count(self, name: str) -> None:
        self.names.append(name)


def connected(path: str, *addresses: str) -> Session:
    session = Session("session-1", 1)
    session.principal = Principal(path)
    session.addresses = dict.fromkeys(addresses)  # type: ignore[assignment]
    return session


@pytest.mark.parametrize(
    ("claimed", "path", "rewritten"),
    [
        (None, "svc/a", 0),
        ("@(svc/a)", "svc/a", 0),
        ("@(svc/a/1)", "svc/a/1", 0),
        ("@(svc/b)", "svc/a", 1),
        ("", "svc/a", 1),
    ],
)
def test_a_claim_is_replaced_unless_verified(claimed: str | None, path: str, rewritten: int) -> None:
    hub = Counts()
    stamped = sender.stamp_sender(hub, connected("svc/a", "svc/a/1"), claimed)  # type: ignore[arg-type]
    assert (stamped.path, stamped.address) == (path, f"@({path})")
    assert (stamped.from_member, hub.names) == (
        f'"from":"@({path})"'.encode(),
        ["from_rewritten"] * rewritten,
    )


def test_only_the_recipient_replies() -> None:
    session, other = connected("svc/a", "svc/a/1"), connected("svc/b")
    for recipient, received_by, path in (
        ("svc/a/1", None, "svc/a/1"),
        ("group/1", session, "group/1"),
        ("svc/b", other, None),
    ):
        stamped = sender.stamp_reply(session, recipient, received_by)
        assert (None if stamped is None else stamped.path) == path
