"""The page that says where each rule is tested names tests that exist, and each property has one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "protocol-coverage.md"
# The properties of live queries, the hub, the edge, searches, schemas, the pipeline and what is around them.
# W-36 is about leases and handoffs between machines: there is one gateway, so that nothing could be tested.
PROPERTIES = {
    "w": [number for number in range(1, 51) if number != 36],
    "h": list(range(1, 47)),
    "e": list(range(1, 26)),
    "m": [1, 2, 3, 4],
    "s": [1, 2, 3, 4],
    "l": [1, 2, 3],
    "v": [1, 2, 3],
    "q": [1, 2, 3],
    "f": [1, 2, 3],
    "r": [1, 2, 3, 4, 5, 6, 7],
    "a": [1, 2, 3, 4, 5, 6],
    "k": [1, 2],
    "i": [1, 2, 3, 4, 5],
    "p": list(range(1, 22)),
    "pr": [1, 2, 3, 4, 5],
    "t": [1, 2, 3, 4, 5, 6, 7],
    "n": [1, 2, 3],
    "x": [1, 2, 3],
}


@cache
def known() -> dict[str, set[str]]:
    """The tests of each file, by its path under `tests/` without the ending."""
    found: dict[str, set[str]] = {}
    for path in TESTS.glob("*/**/test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        names |= {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        found[path.relative_to(TESTS).with_suffix("").as_posix()] = names
    return found


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`([\w/]*test_\w+)::(test_\w+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 150
    assert [f"{file}::{test}" for file, test in named if test not in known().get(file, set())] == []


def test_every_rule_has_a_test() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rules = rows[: next(index for index, row in enumerate(rows) if row.startswith("| property"))]
    untested = [row for row in rules if not row.startswith("| rule |") and "::" not in row]
    assert untested == []


def test_every_property_has_a_test_with_its_number() -> None:
    numbered: set[str] = set()
    for name in set().union(*known().values()):
        if name.startswith("test_"):
            numbered.update(name.split("_"))
        elif found := re.match(r"Test([A-Z]+[0-9]+)", name):
            numbered.add(found[1].lower())
    wanted = [f"{area}{number}" for area, numbers in PROPERTIES.items() for number in numbers]
    assert [one for one in wanted if one not in numbered] == []
