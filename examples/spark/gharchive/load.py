"""Makes a searchable stream of public repository events.

    python load.py github/archive                     # 5,000 records made up here
    python load.py github/archive 2026-01-01-15.json.gz  # one hour of an archive: a record in each line

The schema and the sums that the server is to keep are in schema.json.
"""

# ruff: noqa: INP001, T201
from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import urllib.request
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.client import Client

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ENDPOINT = os.environ.get("TAILRACE_ENDPOINT", "http://127.0.0.1:4437")
SCHEMA = Path(__file__).with_name("schema.json")
START = datetime(2026, 1, 1, 15, tzinfo=UTC)
TYPES = ("PushEvent", "PushEvent", "WatchEvent", "IssuesEvent", "PullRequestEvent")
APPEND_RECORDS = 500


def made_up(count: int, seed: int = 7) -> Iterator[dict[str, Any]]:
    """Records like those of an archive, over ten minutes; a few repositories have most of them."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    for number in range(count):
        kind = chance.choice(TYPES)
        repo = min(int(chance.expovariate(0.4)), 19)
        yield {
            "id": str(40_000_000_000 + number),
            "type": kind,
            "actor": {"login": f"dev{chance.randrange(50)}"},
            "repo": {"id": repo, "name": f"org{repo % 4}/repo{repo}"},
            "payload": {"size": chance.randrange(1, 9)} if kind == "PushEvent" else {},
            "public": True,
            "created_at": (START + timedelta(seconds=600 * number // count)).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }


def archived(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def load(stream: str, records: Iterable[dict[str, Any]]) -> int:
    """The stream with its schema, and all records in it."""
    appended = 0
    with Client(ENDPOINT) as client:
        target = client.stream(stream, content_type="application/json")
        target.create()
        install(stream)
        waiting = iter(records)
        while some := list(itertools.islice(waiting, APPEND_RECORDS)):
            target.append(some)
            appended += len(some)
    return appended


def install(stream: str) -> None:
    request = urllib.request.Request(  # noqa: S310 - the endpoint is yours
        f"{ENDPOINT}/v1/stream/{stream}/_schema",
        data=SCHEMA.read_bytes(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request):  # noqa: S310
        pass


def main(stream: str, archive: str = "") -> None:
    records = archived(Path(archive)) if archive else made_up(5000)
    print(load(stream, records), "records in", stream)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("stream")
    parser.add_argument("archive", nargs="?", default="", help="one hour of an archive")
    given = parser.parse_args()
    main(given.stream, given.archive)
