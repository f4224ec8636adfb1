"""Secrets are compared in constant time: looked up in the sources, so that none is forgotten."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import tailrace

SOURCES = Path(tailrace.__file__).parent
# What a name ends with that may hold a secret, or what is made of one.
WORDS = r"(secret|mac|hmac|signature|password|token|credential|api_key)"
TELLING = re.compile(WORDS + "$", re.IGNORECASE)
SUSPECT = re.compile(rf"{WORDS}\b.*[=!]=|[=!]=.*{WORDS}\b", re.IGNORECASE)
# Comparisons that tell nobody anything: file and comparison, and why.
HARMLESS = {
    "watch/sources/model.py": {"known.token == token": "a place in the log of MongoDB, no secret"},
    "schema/profiles/otel_spans.py": {"fate == SECRET": "a word for what becomes of an attribute"},
    "hub/registration.py": {"token == found.renewal": "found by this very token in a table"},
    "hub/registry.py": {"token == found.renewal": "found by this very token in a table"},
}


def compared_secrets(source: Path) -> list[str]:
    """`==` and `!=` between two values, one of which has a telling name and none is a constant."""
    text = source.read_text(encoding="utf-8")
    if not SUSPECT.search(text):
        return []  # most files are not worth parsing
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.Eq | ast.NotEq):
            continue
        sides = [node.left, *node.comparators]
        if any(isinstance(side, ast.Constant) for side in sides):
            continue
        names = [ast.unparse(side).split("(")[0] for side in sides]
        if any(TELLING.search(name) for name in names):
            found.append(ast.unparse(node))
    return found


def test_no_secret_is_compared_byte_by_byte() -> None:
    unexpected: list[str] = []
    for source in sorted(SOURCES.rglob("*.py")):
        name = source.relative_to(SOURCES).as_posix()
        harmless = HARMLESS.get(name, {})
        unexpected += [f"{name}: {one}" for one in compared_secrets(source) if one not in harmless]
    assert unexpected == []


def test_whatever_makes_a_mac_compares_it_safely() -> None:
    """A file that computes a MAC of its own and checks one says `compare_digest`."""
    checking = {"subscriptions/keys.py", "watch/resume_tokens.py", "hub/signatures.py", "auth/api_keys.py"}
    checking |= {"auth/edge_signature.py"}
    for name in checking:
        assert "hmac.compare_digest(" in (SOURCES / name).read_text(encoding="utf-8"), name
