"""RxDB in Node, as published, with a test at the wheel."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support.calls import eventually

HERE = Path(__file__).resolve().parents[1] / "conformance"


class Clients:
    """One Node process with as many RxDB databases as the test opens."""

    def __init__(self) -> None:
        assert (HERE / "node_modules" / "rxdb").is_dir(), "RxDB is not installed: run `make setup`"
        self._process = subprocess.Popen(
            ["node", "rxdb_client.mjs"],
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.kill()
        self._process.wait()

    def do(self, what: str, client: str, **more: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, "client": client, **more}) + "\n")
        self._process.stdin.flush()
        printed = line = self._process.stdout.readline()
        while line and not line.startswith("=> "):
            line = self._process.stdout.readline()  # the plugin prints by itself
            printed += line
        if not line:
            raise AssertionError(f"node has ended:\n{printed}")
        answer = json.loads(line[3:])
        assert "ok" in answer, f"{what}: {answer['error']}"
        return answer["ok"]

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
