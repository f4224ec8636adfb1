"""The pages about the source tree name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "tailrace"
APPEND_FILES_MAX = 10
SEARCH_FILES_MAX = 12


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_named_files_exist(page: str) -> None:
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", (ROOT / page).read_text(encoding="utf-8")))
    assert len(named) > 10
    places = (ROOT, PACKAGE, PACKAGE / "spark" / "index")
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    inside = {path.name for path in PACKAGE.rglob("*")}
    assert [name for name in missing if name.rstrip("/") not in inside] == []


def test_each_room_is_on_the_map() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rooms = [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()]
    assert [room for room in rooms if f"| `{room}/` |" not in text] == []


@pytest.mark.parametrize(
    ("title", "files_max"),
    [("An append, from socket to answer", APPEND_FILES_MAX), ("A search", SEARCH_FILES_MAX)],
)
def test_paths_through_the_tree_are_short(title: str, files_max: int) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    steps = re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)
    assert 5 < len(steps) <= files_max
    assert len(set(steps)) == len(steps)
