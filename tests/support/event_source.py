"""A stock EventSource (from npm) that applies what it is sent, and leaves the rest to itself."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from support.node import HERE, NodeProgram


class EventSources(NodeProgram):
    """One Node process with as many pages as the test opens."""

    def __init__(self) -> None:
        assert (HERE / "node_modules" / "eventsource").is_dir(), (
            "eventsource is not installed: run `make setup`"
        )
        super().__init__("event_source.mjs")

    def open(self, name: str, base_url: str, query: dict[str, str]) -> None:
        asked = urlencode({**query, "snapshot": "1", "autoResync": "1"})
        self.ask({"do": "open", "name": name, "url": f"{base_url}/realtime/sse?{asked}"})

    def state(self, name: str) -> dict[str, Any]:
        return self.ask({"do": "state", "name": name})

    def close(self, name: str) -> None:
        self.ask({"do": "close", "name": name})
