"""One ordeal: a server, a crew of writers, and one death after the other."""

from __future__ import annotations

import errno
import random
from pathlib import Path

from crash.family import MOSTLY_ENDS, Family
from crash.faults import ALLOCATE, HOT, JOURNAL, SYNC, WRITE, Disk, children, kill_process
from crash.gate import Crew, Writer, pick
from crash.shared import Follower, Loader, ProducerWriter, SeqWriter, SharedStream, SharedWriter
from crash.station import eventually
from crash.wire import Wire
from support.cli import tailrace
from support.sealing import SEALING_ENV, hot
from support.server import ServerProcess

STEPS_BETWEEN_DEATHS = (50, 1000)


class Ordeal:
    """Everything random comes from the seed; only the interleaving is the machine's own."""

    def __init__(self, seed: int, directory: Path, disk: Disk, *, sealing: bool = False) -> None:
        self.random = random.Random(seed)
        self.disk = disk
        # Small files: many rotations and checkpoints between two deaths. Small tails: memory is let go early.
        sizes = (("32KiB", "256KiB"), ("256KiB", "1MiB"), ("64MiB", "256MiB"))
        # With sealing, the journal moves on too often for large files.
        file_bytes, tail_bytes = sizes[seed % (2 if sealing else 3)]
        flags = ("--journal-file-bytes", file_bytes, "--tail-memory-max-bytes", tail_bytes)
        env = {**disk.env, **SEALING_ENV} if sealing else disk.env
        self.server = ServerProcess(directory / "data", args=flags, env=env)
        self.sealing = sealing
        self.slow = seed % 2 == 1
        self.kills = 0
        self.deaths: dict[str, int] = {}
        self.server.start()
        self.stream = SharedStream("shared/stream")
        wire = Wire(self.server.port)
        self.stream.create(wire)
        wire.close()
        self.crew = Crew(self.server.port, self._writers(seed))

    def _writers(self, seed: int) -> list[Writer]:
        stream = self.stream
        return [
            Loader(stream),
            *(SharedWriter(stream, f"plain-{index}", seed) for index in range(3)),
            SharedWriter(stream, "batch", seed, batch_max=5),
            SeqWriter(stream, "seq", seed),
            *(ProducerWriter(stream, f"producer-{index}", seed) for index in range(2)),
            Follower(stream),
            *(Family(f"family-{index}", seed) for index in range(3)),
            *(Family(f"ends-{index}", seed, 25, MOSTLY_ENDS) for index in range(2)),
        ]

    def run(self, kills: int) -> None:
        try:
            while self.kills < kills:
                self._one_life()
                self.crew.settle()
        finally:
            self.crew.end()
            self.server.kill()
        assert len(self.stream.entries) > 20 * kills, "the writers hardly wrote"

    def check_bucket(self) -> None:
        """What the object store holds is whole, and it holds something."""
        assert list((self.server.data_dir / "objects").rglob("*.parquet"))
        done = tailrace("verify", "--data-dir", str(self.server.data_dir))
        assert done.code == 0, done.out + done.err

    def run_faults(self, rounds: int) -> None:
        """One fault after the other instead of deaths; now and then a death on top of it."""
        try:
            for _ in range(rounds):
                self._one_fault()
                self.crew.settle()
                if self.random.random() < 0.4:
                    self.server.restart(kill=True)
                    self.kills += 1
                    self.crew.settle()
        finally:
            self.crew.end()
            self.server.kill()
        assert len(self.stream.entries) > 20 * rounds, "the writers hardly wrote"

    def _one_fault(self) -> None:
        """The disk fails under full load and is mended; the server goes on by itself."""
        if self.slow:
            self.disk.jitter(JOURNAL, WRITE | SYNC, 4000)
        self.crew.go()
        self.crew.wait_steps(self.random.randint(50, 300))
        text = self.random.choice((JOURNAL, JOURNAL, HOT))
        operation = self.random.choice((WRITE, SYNC, WRITE | SYNC | ALLOCATE))
        error = self.random.choice((errno.EIO, errno.ENOSPC))
        self.disk.fail(
            text,
            operation,
            error,
            skip=self.random.randint(0, 50),
            count=self.random.choice((1, 1, 2, -1)),
        )
        self.crew.wait_steps(self.random.randint(100, 500))
        self.crew.rest()
        self.disk.heal()
        eventually(lambda: self.server.status("/readyz") == 200, "the server goes on by itself")

    def _one_life(self) -> None:
        """Writers work until the server dies; then it is started again."""
        if self.slow:
            # Syncs that take a while are kept in flight side by side, and finish in any order.
            self.disk.jitter(JOURNAL, WRITE | SYNC, 4000)
        self.crew.go()
        if self.sealing:
            # The sealer takes a moment to start, and has to be at work when the server dies.
            before = hot(self.server.data_dir).get("segments", 0)
            eventually(lambda: hot(self.server.data_dir).get("segments", 0) > before, "segments are recorded")
        if self.random.random() < 0.5:
            self._kill_checkpointer()
        kind = pick(self.random, {"kill": 6, "tear": 2, "die": 2})
        self.deaths[kind] = self.deaths.get(kind, 0) + 1
        if kind == "kill":
            self.crew.wait_steps(self.random.randint(*STEPS_BETWEEN_DEATHS))
        else:
            self._arrange_death(kind)
            self.crew.wait_steps(10 * STEPS_BETWEEN_DEATHS[1])
        self.server.kill()
        self.kills += 1
        self.crew.rest()
        self.disk.heal()
        self._between_lives()
        self.server.start()

    def _between_lives(self) -> None:
        """The server is dead, and the disk is well again."""

    def _arrange_death(self, kind: str) -> None:
        """The process dies at an exact point of its own I/O."""
        skip = self.random.randint(0, 200)
        if kind == "tear":
            self.disk.tear(JOURNAL, self.random.choice((1, 7, 63, 64, 65, 72, 100, 500, 3000)), skip=skip)
        else:
            self.disk.die(JOURNAL, self.random.choice((WRITE, SYNC)), skip=skip)

    def _kill_checkpointer(self) -> None:
        """The child dies alone: between two steps, or in the middle of its own writing."""
        if self.random.random() < 0.5:
            self.disk.die(HOT, self.random.choice((WRITE, SYNC)), skip=self.random.randint(0, 60))
            return
        self.crew.wait_steps(self.random.randint(1, 100))
        for child in children(self.server.pid):
            kill_process(child)
