"""What an append leaves behind in memory: its entries, once, and nothing that waits for the collector."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
from pathlib import Path
from typing import Any

from support.http_app import on_loop, until
from tailrace.common.settings import Settings
from tailrace.log.decide import AppendRequest
from tailrace.server.process import Server
from tailrace.storage.data_directory import DataDirectory


def call(port: int, method: str, path: str, body: Any = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        sent = None if body is None else json.dumps(body)
        connection.request(method, f"/v1/stream/{path}", sent, {"Content-Type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


def requests() -> list[AppendRequest]:
    return [found for found in gc.get_objects() if type(found) is AppendRequest]


def test_requests_on_streams_with_documents_are_gone_when_they_are_answered(tmp_path: Path) -> None:
    """A request that holds itself would hold its body, which is the block of its entries, for a long time."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        directory = DataDirectory(tmp_path / "data")
        server = Server(Settings(data_dir=tmp_path / "data", port=0, pipeline="off"), directory, loop)
        await server.start()
        port = int(server.url.rpartition(":")[2])
        try:
            assert await loop.run_in_executor(None, call, port, "PUT", "s") == 201
            profile = {"profile": {"kind": "evlog"}}
            assert await loop.run_in_executor(None, call, port, "POST", "s/_profile", profile) == 200
            gc.collect()
            gc.disable()
            before = len(requests())
            for _ in range(5):
                answered = await loop.run_in_executor(None, call, port, "POST", "s", [{"status": 1}] * 3)
                assert answered == 204
            refused = await loop.run_in_executor(None, call, port, "POST", "s", [5])
            assert refused == 400
            # Others in this process may have left some. A thread that commits may take a moment to let go.
            await until(lambda: len(requests()) == before)
        finally:
            gc.enable()
            await server.stop()
            directory.close()

    on_loop(main)
