# pyright: strict
"""Realistic wide events of about 1 KiB, the same for the same seed on every machine.

Events come in blocks, each with a generator of its own: event n is the same however many there are. They are
spread evenly over one day. Services, words, plans and the like are skewed as they are in life; ids are not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, TypeVar

import orjson

from bench.evlog import words

BLOCK: Final = 1000
DAY_MS: Final = 86_400_000
FIRST: Final = datetime(2026, 1, 1, tzinfo=UTC)
FIRST_MS: Final = int(FIRST.timestamp() * 1000)
LAST: Final = FIRST + timedelta(days=1)

Event = dict[str, object]
T = TypeVar("T")


class Draw:
    """The choices of one block."""

    def __init__(self, seed: int, block: int) -> None:
        self._random = random.Random(f"evlog:{seed}:{block}")
        self.real = self._random.random

    def skewed(self, choices: Sequence[T], skew: float = 2.0) -> T:
        """The first half of the choices is taken much more often than the second."""
        return choices[int(len(choices) * self.real() ** skew)]

    def below(self, bound: int) -> int:
        return int(bound * self.real())

    def hexadecimal(self, digits: int) -> str:
        return f"{self._random.getrandbits(4 * digits):0{digits}x}"

    def milliseconds(self, middle: float) -> float:
        """Log-normal, as latencies are: most near the middle, some many times as long."""
        return round(middle * math.exp(self._random.gauss(0.0, 0.9)), 3)


def block_of(seed: int, block: int, spacing_ms: float) -> list[Event]:
    """The events of one block; `spacing_ms` lies between two of them."""
    draw = Draw(seed, block)
    first = block * BLOCK
    return [_event(draw, FIRST_MS + int((first + index) * spacing_ms)) for index in range(BLOCK)]


def _event(draw: Draw, at_ms: int) -> Event:
    service = draw.skewed(words.SERVICES)
    slow = 40.0 + 6.0 * len(service)
    status = _status(draw.real())
    failed = status >= 500 or (status >= 400 and draw.real() < 0.3)
    duration = draw.milliseconds(slow * (6.0 if status >= 500 else 1.0))
    resource = draw.skewed(words.RESOURCES)
    noun = draw.skewed(words.NOUNS, 2.5)
    customer = draw.below(50_000)
    event: Event = {
        "timestamp": datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")[:23] + "Z",
        "level": "error"
        if failed
        else "warn"
        if status >= 400
        else "debug"
        if draw.real() < 0.05
        else "info",
        "service": service,
        "environment": words.ENVIRONMENTS[draw.below(len(words.ENVIRONMENTS))],
        "version": draw.skewed(words.VERSIONS),
        "region": draw.skewed(words.REGIONS),
        "requestId": "req_" + draw.hexadecimal(20),
        "traceId": draw.hexadecimal(32),
        "spanId": draw.hexadecimal(16),
        "method": words.METHODS[draw.below(len(words.METHODS))],
        "path": f"/api/v{1 + draw.below(2)}/{resource}/{customer}",
        "status": status,
        "duration": duration,
    }
    names = {"noun": noun, "id": str(customer), "ms": str(int(duration))}
    if failed:
        _fail(event, draw, names)
    else:
        event["message"] = draw.skewed(words.MESSAGES, 2.2).format_map(names)
    return event | _context(draw, service, resource, customer, duration)


def _status(chance: float) -> int:
    if chance < 0.93:
        return 200 if chance < 0.8 else 201 if chance < 0.88 else 204
    if chance < 0.985:
        return 404 if chance < 0.955 else 400 if chance < 0.97 else 401 if chance < 0.98 else 429
    return 500 if chance < 0.992 else 503 if chance < 0.997 else 504


def _fail(event: Event, draw: Draw, names: dict[str, str]) -> None:
    name, message, why, fix = draw.skewed(words.ERRORS)
    text = message.format_map(names)
    event["message"] = f"{event['method']} {event['path']} failed: {text}"
    event["why"] = why.format_map(names)
    event["fix"] = fix.format_map(names)
    event["link"] = f"https://runbooks.example.com/{name.lower()}"
    event["error"] = {"name": name, "message": text, "retryable": draw.real() < 0.5}


def _context(draw: Draw, service: str, resource: str, customer: int, duration: float) -> Event:
    database = round(duration * draw.real() * 0.7, 3)
    return {
        "user": {
            "id": f"user_{customer}",
            "plan": words.PLANS[draw.below(len(words.PLANS))],
            "tenant": f"tenant_{draw.skewed(range(800))}",
        },
        "http": {
            "host": f"{service.lower()}.shop.example.com",
            "userAgent": draw.skewed(words.AGENTS),
            "bytesIn": draw.below(4_000),
            "bytesOut": int(draw.milliseconds(6_000)),
            "remoteAddress": f"10.{draw.below(32)}.{draw.below(256)}.{draw.below(256)}",
        },
        "db": {"queries": draw.below(12), "ms": database, "rows": draw.below(400), "table": resource},
        "cache": {"hits": draw.below(20), "misses": draw.below(5)},
        "pod": f"{service.lower()}-{draw.hexadecimal(8)}-{draw.hexadecimal(5)}",
        "build": {"commit": draw.hexadecimal(40), "node": f"ip-10-0-{draw.below(64)}-{draw.below(256)}"},
        "features": [flag for flag in words.FLAGS if draw.real() < 0.3],
    }


def write_events(path: Path, count: int, seed: int) -> None:
    """One event a line. A file that is already there is of the same events."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    spacing_ms = DAY_MS / count
    with fresh.open("wb") as lines:
        for block in range(-(-count // BLOCK)):
            for event in block_of(seed, block, spacing_ms)[: count - block * BLOCK]:
                lines.write(orjson.dumps(event))
                lines.write(b"\n")
    fresh.rename(path)


def read_events(path: Path) -> Iterator[Event]:
    with path.open("rb") as lines:
        for line in lines:
            yield orjson.loads(line)


def bodies(path: Path, sizes: Iterator[int]) -> Iterator[tuple[int, bytes]]:
    """The events as JSON arrays of so many each, and how many there are."""
    with path.open("rb") as lines:
        for size in sizes:
            batch = [line[:-1] for _, line in zip(range(size), lines, strict=False)]
            if not batch:
                return
            yield len(batch), b"[" + b",".join(batch) + b"]"
