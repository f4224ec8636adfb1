"""The page about live queries shows every message that the server sends, as it sends it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from support.calls import Caller
from support.server import ServerProcess
from support.watch_client import Live

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "watch.md").read_text(encoding="utf-8")
SENT = re.compile(r'(?:reply|subscription_notice)\(\s*"([a-z_-]+)"|"type":"([a-z-]+)"')
BASE = "/v1/databases/default"
QUERY = {"collection": "orders", "where": "doc.total > 100"}


def shown() -> list[dict[str, Any]]:
    (block,) = re.findall(r"^```json server messages\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [json.loads(line) for line in block.splitlines()]


def form(value: Any) -> Any:
    """What a message is made of, whatever its values are."""
    if isinstance(value, dict):
        return {name: form(held) for name, held in value.items()}
    if isinstance(value, list):
        return [form(held) for held in value[:1]]
    return None


def kind_of(message: dict[str, Any]) -> tuple[Any, ...]:
    payload = message["payload"]
    variant = payload.get("kind"), payload.get("status"), payload.get("delta", {}).get("op")
    return message["type"], *variant


def received(server: ServerProcess) -> list[dict[str, Any]]:
    """One message of each kind."""
    call, live = Caller(server), Live(server)
    assert call("PUT", f"{BASE}/collections/orders", {"partitions": 2}).status == 201
    call("PUT", f"{BASE}/docs/orders/o-1", {"total": 120})
    live.send("auth", "1", database="default", tokens="each", checksum=True)
    found = [live.take()]
    live.send("subscribe", "orders", query=QUERY, sendSnapshot=True)
    found += live.take_until("snapshot-end")
    call("PUT", f"{BASE}/docs/orders/o-2", {"total": 300})
    found.append(live.take())
    call("PUT", f"{BASE}/docs/orders/o-2", {"total": 3})
    found.append(live.take())
    live.send("resume", "2", subId="again", token=found[-1]["payload"]["token"], query=QUERY)
    found.append(live.take())
    live.send("resume", "2", subId="other", token="none", query=QUERY)
    found += live.take_until("resync-required")
    for kind, given in (("heartbeat", {}), ("unsubscribe", {"id": "orders"}), ("unsubscribe", {"id": "x"})):
        live.send(kind, "3", **given)
        found.append(live.take())
    live.send("stream", "feed", collection="orders", checkpoint=None)
    found += live.take_until("stream-event")
    live.close()
    return found


def test_messages_look_as_the_page_shows_them(server: ServerProcess) -> None:
    page = {kind_of(message): form(message) for message in shown()}
    sent = {kind_of(message): form(message) for message in received(server)}
    assert sent.keys() == page.keys()
    for kind, expected in sent.items():
        assert page[kind] == expected, kind


def test_every_type_of_message_is_on_the_page() -> None:
    sources = (ROOT / "src" / "tailrace" / "watch").rglob("*.py")
    written = "".join(path.read_text(encoding="utf-8") for path in sources)
    assert {one or other for one, other in SENT.findall(written)} == {message["type"] for message in shown()}
