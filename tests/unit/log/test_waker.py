"""Many who wait at one tail: all are told, some per turn, and what comes meanwhile is told with the rest."""

from __future__ import annotations

import asyncio

from tailrace.log.model import LiveReader, Stream
from tailrace.log.publish import READERS_PER_BATCH, Waker

MANY = 3 * READERS_PER_BATCH + 1


class Reader:
    """Notes what it saw; `leaves` does what a reader that ends does to the list."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.leaves = False

    def on_published(self, stream: Stream) -> None:
        if not self.seen or self.seen[-1] < stream.visible:
            self.seen.append(stream.visible)
        if self.leaves:
            leave(stream, self)


def leave(stream: Stream, reader: Reader) -> None:
    stream.readers = [other for other in stream.readers or () if other is not reader] or None


def waiting(count: int) -> tuple[Stream, list[Reader]]:
    stream = Stream(1, "s", 0)
    readers = [Reader() for _ in range(count)]
    listed: list[LiveReader] = [*readers]
    stream.readers = listed
    return stream, readers


async def turns(count: int = 2 * MANY // READERS_PER_BATCH + 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_few_are_told_at_once() -> None:
    async def main() -> None:
        stream, readers = waiting(READERS_PER_BATCH)
        stream.visible = 1
        Waker(asyncio.get_running_loop()).wake(stream)
        assert all(reader.seen == [1] for reader in readers)

    asyncio.run(main())


def test_many_are_told_in_turns_and_the_last_get_everything_together() -> None:
    async def main() -> None:
        stream, readers = waiting(MANY)
        waker = Waker(asyncio.get_running_loop())
        stream.visible = 1
        waker.wake(stream)
        assert sum(bool(reader.seen) for reader in readers) == READERS_PER_BATCH
        stream.visible = 2
        waker.wake(stream)
        stream.visible = 3
        waker.wake(stream)
        await turns()
        assert [reader.seen for reader in readers[:READERS_PER_BATCH]] == [[1, 3]] * READERS_PER_BATCH
        assert [reader.seen for reader in readers[READERS_PER_BATCH:]] == [[3]] * (MANY - READERS_PER_BATCH)
        stream.visible = 4
        waker.wake(stream)
        await turns()
        assert all(reader.seen[-1] == 4 for reader in readers), "a round that is over leaves nothing behind"

    asyncio.run(main())


def test_who_leaves_is_not_told_and_who_comes_is() -> None:
    async def main() -> None:
        stream, readers = waiting(MANY)
        readers[0].leaves = readers[-2].leaves = True
        waker = Waker(asyncio.get_running_loop())
        stream.visible = 1
        waker.wake(stream)
        gone, late = readers[-1], Reader()
        leave(stream, gone)
        assert stream.readers is not None
        stream.readers.append(late)
        stream.visible = 2
        waker.wake(stream)
        await turns()
        assert gone.seen == []
        assert readers[0].seen == [1]
        assert readers[-2].seen == [2]
        assert late.seen == [2]
        assert all(reader.seen[-1] == 2 for reader in readers[1:-1])

    asyncio.run(main())


def test_nobody_is_left_to_be_told() -> None:
    async def main() -> None:
        stream, _ = waiting(MANY)
        waker = Waker(asyncio.get_running_loop())
        stream.visible = 1
        waker.wake(stream)
        stream.readers = None
        stream.visible = 2
        waker.wake(stream)
        await turns()
        later, readers = stream, [Reader()]
        listed: list[LiveReader] = [*readers]
        later.readers = listed
        later.visible = 3
        waker.wake(later)
        assert readers[0].seen == [3]

    asyncio.run(main())
