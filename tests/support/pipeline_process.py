"""A real server and a real `tailrace pipeline run` beside it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from support.calls import eventually
from support.spark import quick_start

RUN_S_MAX = 800.0


class Run(NamedTuple):
    """One pipeline under way, and where it writes."""

    process: subprocess.Popen[bytes]
    log: Path

    def finish(self) -> tuple[int, str]:
        """How it ended, and what it said."""
        try:
            self.process.wait(timeout=RUN_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the pipeline did not end:\n{self.log.read_text()}") from None
        return self.process.returncode, self.log.read_text(errors="replace")


class Station:
    """Calls to one server, and pipelines that are run for it, one after the other or at once."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory
        self._http = httpx2.Client(base_url=url, timeout=60.0)
        self._count = 0

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, body: Any = None, *, expected: int = 200) -> Any:
        answer = self._http.request(method, path, json=body)
        assert answer.status_code == expected, answer.text
        return answer.json() if answer.content else None

    def stream(self, name: str, *, profile: str | None = None, schema: Any = None) -> None:
        answer = self._http.put(f"/v1/stream/{name}", headers={"Content-Type": "application/json"})
        assert answer.status_code == 201, answer.text
        if profile is not None:
            self.call("POST", f"/v1/stream/{name}/_profile", {"profile": {"kind": profile}})
        if schema is not None:
            self.call("POST", f"/v1/stream/{name}/_schema", schema)

    def seal(self, name: str, records: list[Any]) -> None:
        """One more segment."""
        answer = self._http.post(f"/v1/stream/{name}", json=records)
        assert answer.status_code == 204, answer.text
        answer = self._http.post("/v1/server/_seal", params={"stream": name})
        assert answer.status_code == 200, answer.text

    def plan(self, name: str) -> Any:
        return self.call("GET", f"/v1/pipeline/plan?stream={name}")["streams"][0]

    def search(self, name: str, q: str, **more: Any) -> Any:
        """A search has three seconds, and on a busy machine it may need more than one try."""
        path, body = f"/v1/stream/{name}/_search", {"q": q, "size": 500, **more}
        answer = eventually(
            lambda: self._http.request("POST", path, json=body), lambda found: found.status_code != 408
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def start(self, *flags: str, env: dict[str, str] | None = None, master: str = "local[2]") -> Run:
        """A pipeline that does everything once."""
        self._count += 1
        checkpoint = self.directory / f"pipeline{self._count}"
        arguments = ["pipeline", "run", "--once", "--endpoint", self.url, "--checkpoint", str(checkpoint)]
        # To a file: the JVM of a driver that was killed holds its output open for a while.
        output = self.directory / f"pipeline{self._count}.log"
        with output.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tailrace", *arguments, "--master", master, *flags],
                env=os.environ | quick_start(self.directory) | (env or {}),
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
            )
        return Run(process, output)

    def run(self, *flags: str, env: dict[str, str] | None = None, master: str = "local[2]") -> str:
        """To the end, which must be a good one."""
        code, output = self.start(*flags, env=env, master=master).finish()
        assert code == 0, output
        return output


EVENTS = 20


def _events(first: int) -> list[dict[str, Any]]:
    return [
        {
            "timestamp": 1767225600000 + 1000 * number,
            "service": f"svc{number % 3}",
            "level": "error" if number % 4 == 0 else "info",
            "status": 500 if number % 4 == 0 else 200,
            "duration": number / 3,
            "requestId": f"req-{number}",
            "message": f"request {number} of customer {number % 7} is through",
        }
        for number in range(first, first + EVENTS)
    ]


def fill(station: Station, name: str, segments: int = 3) -> None:
    station.stream(name, profile="evlog")
    for number in range(segments):
        station.seal(name, _events(number * EVENTS))


def corpus(station: Station, name: str) -> list[Any]:
    """What queries answer, without how they came by it."""
    asked: list[Any] = []
    for q in (
        "service:svc1",
        "message:customer",
        'message:"customer 3"',
        "status:>=500",
        "NOT level:error",
        "req*",
    ):
        answer = station.search(name, q, sort=["offset:asc"])
        asked.append([(hit["offset"], hit["fields"]) for hit in answer["hits"]])
        assert answer["coverage"]["complete"]
    body = {"rollup": "requests", "from": 1767225600000, "to": 1767226600000, "interval": "1m"}
    asked.append(
        station.call("POST", f"/v1/stream/{name}/_aggregate", {**body, "group_by": ["service"]})["buckets"]
    )
    return asked


def listed(station: Station, name: str, segments: int) -> None:
    """Every segment has got its companions, all at once and only once."""
    folder = station.plan(name)["stream_id"]

    def published() -> list[Any]:
        found = station.call("GET", "/v1/stream/__segments__?offset=-1")
        return [one for one in found if one["type"] == "companion" and one["key"].startswith(folder)]

    found = eventually(published, lambda seen: len(seen) >= segments)
    assert len({one["key"] for one in found}) == len(found) == segments
    families = {tuple(sorted(one["value"]["families"])) for one in found}
    assert families == {("agg", "col", "exact", "fts", "routing_key_index")}


def content(station: Station, name: str) -> str:
    """A hash of all pages with their offsets."""
    seen, offset = hashlib.sha256(), "-1"
    while True:
        answer = httpx2.get(f"{station.url}/v1/stream/{name}", params={"offset": offset})
        assert answer.status_code == 200, answer.text
        offset = answer.headers["stream-next-offset"]
        seen.update(answer.content + offset.encode())
        if answer.headers.get("stream-up-to-date") == "true":
            return seen.hexdigest()


def segments(station: Station, name: str) -> int:
    found = station.call("GET", f"/v1/stream/{name}/_details")
    return found["storage"]["object_storage"]["segment_object_count"]
