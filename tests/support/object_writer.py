"""A process that writes to an object store and says what was acknowledged, a line each.

``python object_writer.py URL fill|race|count NUMBER NAME``: `fill` creates objects and replaces a head until
it is killed, `race` tries to create objects that others want too, `count` adds to a shared counter.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import sys

from tailrace.storage.object_store.interface import (
    ObjectConflictError,
    ObjectExistsError,
    ObjectMissingError,
    ObjectStore,
    open_object_store,
)


def content(key: str, size: int) -> bytes:
    """Bytes that follow from the key, so that half an object, or another's, is seen."""
    block = hashlib.sha256(key.encode()).digest()
    return (block * (size // len(block) + 1))[:size]


def head_content(number: int) -> bytes:
    return str(number).encode() + b":" + content(f"head {number}", 100_000)


async def fill(objects: ObjectStore, number: int, name: str) -> None:
    tag: str | None = None
    for turn in itertools.count():
        key = f"{name}/{turn:06d}"
        await objects.create(key, content(key, number))
        say(key)
        tag = await objects.replace(f"{name}/head", head_content(turn), tag)
        say(f"head {turn}")


async def race(objects: ObjectStore, number: int, name: str) -> None:
    for turn in range(number):
        try:
            await objects.create(f"race/{turn:06d}", name.encode())
        except ObjectExistsError:
            continue
        say(f"race/{turn:06d}")


async def count(objects: ObjectStore, number: int, name: str) -> None:
    done = 0
    while done < number:
        try:
            data, tag = await objects.get("count")
        except ObjectMissingError:
            data, tag = b"0", None
        try:
            await objects.replace("count", str(int(data) + 1).encode(), tag)
        except ObjectConflictError:
            continue
        done += 1
    say(name)


def say(line: str) -> None:
    print(line, flush=True)


async def main() -> None:
    url, mode, number, name = sys.argv[1:]
    work = {"fill": fill, "race": race, "count": count}[mode]
    await work(open_object_store(url), int(number), name)


if __name__ == "__main__":
    asyncio.run(main())
