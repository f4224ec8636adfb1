"""RxDB in Node, as published, with a test at the wheel."""

from __future__ import annotations

from typing import Any

from support.calls import eventually
from support.node import HERE, NodeProgram


class Clients(NodeProgram):
    """One Node process with as many RxDB databases as the test opens."""

    def __init__(self) -> None:
        assert (HERE / "node_modules" / "rxdb").is_dir(), "RxDB is not installed: run `make setup`"
        super().__init__("rxdb_client.mjs")

    def do(self, what: str, client: str, **more: Any) -> Any:
        return self.ask({"do": what, "client": client, **more})

    def documents(self, client: str) -> dict[str, Any]:
        """What a client holds, as people wrote it."""
        found: dict[str, Any] = self.do("state", client)["documents"]
        return {
            name: {field: value for field, value in one.items() if field in ("n", "text")}
            for name, one in found.items()
        }

    def conflicts(self, client: str) -> int:
        return self.do("state", client)["conflicts"]

    def await_documents(self, client: str, wanted: dict[str, Any]) -> None:
        eventually(lambda: self.documents(client), lambda found: found == wanted)
