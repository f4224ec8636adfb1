# pyright: strict
"""Calls the load generator and decodes what it prints."""

from __future__ import annotations

import subprocess
from collections.abc import Generator as Iterating
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from bench.peers import Wire
from bench.places import LOAD
from bench.processes import PeerError, pinned

Result = TypeVar("Result")


class Latency(msgspec.Struct, frozen=True):
    """Microseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    p999: float
    max: float


class Load(msgspec.Struct, frozen=True):
    connections: int
    streams: int
    body_bytes: int
    seconds: float
    ops: int
    ops_per_s: float
    messages_per_s: float
    bytes: int
    bytes_per_s: float
    latency_us: Latency
    status: dict[str, int]
    errors: int
    reconnects: int
    stalled: bool
    load_cpu_share: float


class Fanout(msgspec.Struct, frozen=True):
    readers: int
    rate_per_s: int
    seconds: float
    offered: int
    sent: int
    appended: int
    append_errors: int
    expected: int
    delivered: int
    duplicates: int
    reconnects: int
    load_cpu_share: float
    delivery_us: Latency
    append_us: Latency


class Follow(msgspec.Struct, frozen=True):
    """Readers that come back. Delivered is what was followed by a control; data without one is incomplete."""

    readers: int
    seconds: float
    finished: int
    least: int
    most: int
    delivered: int
    missed: int
    doubled: int
    incomplete: int
    losses: int
    refusals: int
    rotations: int
    all_us: Latency
    calm_us: Latency


def decoded(out: bytes, kind: type[Result]) -> Result:
    """A server that answers what cannot be measured fails its own reading, not the run."""
    try:
        return msgspec.json.decode(out, type=kind)
    except msgspec.MsgspecError as error:
        raise PeerError(f"the load printed {out[:200]!r}: {error}") from None


@dataclass(frozen=True, slots=True)
class Generator:
    """The load program on its cores. Options are the program's own, with underscores."""

    cpus: frozenset[int] | None

    def start(self, port: int, **options: str | int | float | bool) -> subprocess.Popen[bytes]:
        argv = [str(LOAD), "--port", str(port)]
        for name, value in options.items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                argv.append(flag)
            elif value is not False:
                argv += [flag, str(value)]
        return subprocess.Popen(pinned(argv, self.cpus), stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def _output(self, process: subprocess.Popen[bytes], patience_s: float, *, said: bool = False) -> bytes:
        try:
            out, err = process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise PeerError(f"load did not end within {patience_s:.0f} s") from None
        if process.returncode not in (0, 3) or not (out or said):
            raise PeerError(err.decode(errors="replace").strip() or f"load exited with {process.returncode}")
        return out

    def finish(self, process: subprocess.Popen[bytes], patience_s: float = 300.0) -> Load:
        return decoded(self._output(process, patience_s), Load)

    def run(self, port: int, **options: str | int | float | bool) -> Load:
        return self.finish(self.start(port, **options))

    def fanout(self, port: int, **options: str | int | float | bool) -> Fanout:
        process = self.start(port, mode="fanout", **options)
        return decoded(self._output(process, 300.0), Fanout)

    @contextmanager
    def reporting(
        self, kind: type[Result], port: int, every: float, **options: str | int | float | bool
    ) -> Iterating[Iterator[Result]]:
        """A program that reports every so many seconds, and ends with the block at the latest."""
        with self.start(port, every=every, **options) as process:
            try:
                yield self._reports(kind, process)
            finally:
                process.kill()

    def _reports(self, kind: type[Result], process: subprocess.Popen[bytes]) -> Iterator[Result]:
        assert process.stdout is not None
        for line in process.stdout:
            yield decoded(line, kind)
        self._output(process, patience_s=5.0, said=True)

    def follow(self, process: subprocess.Popen[bytes], patience_s: float) -> Follow:
        return decoded(self._output(process, patience_s), Follow)


def append_options(wire: Wire, name: str = "bench") -> dict[str, str | int | float | bool]:
    """The options that make one append in each protocol, creating the streams first where that is a step."""
    if wire == "redis":
        return {"mode": "redis", "path": f"{name}-%d"}
    if wire == "nats":
        return {"mode": "nats", "path": f"{name}.%d", "create": True}
    return {"mode": "append", "path": f"/v1/stream/{name}-%d", "create": True}
