"""Every example of the wire page is what the hub takes and sends, and no type of message is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.wire_page import Play, sections_of
from tailrace.hub.decide import HANDLERS
from tailrace.hub.errors import HUB_CODES

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = sections_of(ROOT / "docs" / "hub-wire.md")


@pytest.mark.parametrize("title", SECTIONS)
def test_the_hub_takes_and_sends_what_the_page_has(title: str) -> None:
    play = Play()
    for step in SECTIONS[title]:
        if step.kind == "stage":
            play.stage(step.text)
        elif step.kind == "to":
            play.say(step.text)
        else:
            play.compare(json.loads(step.text), play.hear(step.text))
    assert play.unread() == [], "what the hub says is on the page"


def test_every_type_is_on_the_page() -> None:
    shown = {way: _types(way) for way in ("to", "from")}
    assert shown["to"] == {*HANDLERS, "hub:connect"}
    written = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/tailrace/hub").glob("*.py"))
    typed = {meaning.typed for meaning in HUB_CODES.values() if meaning.typed is not None}
    assert shown["from"] >= typed
    assert shown["to"] | shown["from"] == set(re.findall(r'"(hub:[a-z_]+)"', written))


def _types(way: str) -> set[str]:
    steps = [step for steps in SECTIONS.values() for step in steps if step.kind == way]
    types: set[str] = {json.loads(step.text)["type"] for step in steps}
    return {kind for kind in types if kind.startswith("hub:")}
