# pyright: strict
"""Sections of pages that are written by a bench: they stand between two marks."""

from __future__ import annotations

from pathlib import Path


def write_section(page: Path, name: str, heading: str, text: str) -> None:
    """Replaces what stands between the marks, or adds it with a heading at the end."""
    opening, closing = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    whole = page.read_text(encoding="utf-8")
    begin, end = whole.find(opening), whole.find(closing)
    section = f"{opening}\n{text}{closing}"
    if begin < 0 or end < begin:
        whole = f"{whole.rstrip()}\n\n## {heading}\n\n{section}\n"
    else:
        whole = whole[:begin] + section + whole[end + len(closing) :]
    page.write_text(whole, encoding="utf-8")
