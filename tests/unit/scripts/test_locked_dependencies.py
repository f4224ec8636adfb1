"""What the project is built on, as far as that can be judged without asking anybody.

Advisories are looked up at a service, which tests do not do: `pip-audit -r requirements/run.txt` does it
wherever there is a network. What is held here is that there is something to audit: one version of each
package, named by its hash.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.markers import Marker

ROOT = Path(__file__).resolve().parents[3]
LOCKS = ("run.txt", "dev.txt")
_ENTRY = re.compile(r"([a-z0-9-]+)(?:\[.*?\])?==([^\s;\\]+)(.*)", re.DOTALL)


def locked(lock: str) -> dict[str, tuple[str, str]]:
    """Version and the rest of the entry, by name."""
    text = (ROOT / "requirements" / lock).read_text(encoding="utf-8")
    entries = re.split(r"\n(?=\S)", text.strip())
    found = {entry: _ENTRY.match(entry) for entry in entries}
    assert [entry for entry, match in found.items() if match is None] == [], "no URLs, no ranges"
    matches = [match for match in found.values() if match is not None]
    return {match[1]: (match[2], match[3]) for match in matches if _is_for_here(match[3])}


def _is_for_here(rest: str) -> bool:
    """Some have another version for another Python."""
    marker = re.match(r"\s*;\s*([^\\]+)", rest)
    return marker is None or Marker(marker[1].strip()).evaluate()


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_is_exactly_the_one_that_was_chosen(lock: str) -> None:
    """By hash: whatever a mirror serves instead is not installed."""
    entries = locked(lock)
    assert len(entries) > 10
    assert [name for name, (_, rest) in entries.items() if "--hash=sha256:" not in rest] == []


def test_what_is_installed_is_what_is_locked() -> None:
    wrong: list[str] = []
    for name, (pinned, _) in locked("run.txt").items():
        try:
            found = version(name)
        except PackageNotFoundError:
            continue  # for another system or Python
        if found != pinned:
            wrong.append(f"{name} {found} instead of {pinned}")
    assert wrong == []
