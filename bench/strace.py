# pyright: strict
"""Does each peer sync before it acknowledges? Ask the kernel.

Every peer runs under strace while appends are made, first one after the other, then on 64 connections.
Counted are the calls that make data durable (fsync, fdatasync, msync, writes to files opened with O_SYNC or
O_DSYNC), and for each acknowledgement on a socket whether such a call had finished since the one before it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

import msgspec

from bench import install, peers
from bench.loadgen import Generator, append_options
from bench.peers import Peer, Wire
from bench.places import DATA, RESULTS
from bench.processes import PeerError

SEQUENTIAL, CONCURRENT, CONNECTIONS = 50, 640, 64
WRITES = ("write", "writev", "pwrite64", "pwritev")
SYNCS = ("fsync", "fdatasync", "msync", "sync_file_range")
TRACED = (
    *SYNCS,
    "openat",
    "write",
    "writev",
    "pwrite64",
    "pwritev",
    "pwritev2",
    "sendto",
    "sendmsg",
    "io_uring_enter",
)
ACKNOWLEDGEMENT: dict[Wire, re.Pattern[str]] = {
    "http": re.compile(r'"HTTP/1\.1 20[04]'),
    "redis": re.compile(r'"\$\d+\\r\\n\d+-\d+'),
    "nats": re.compile(r"MSG _INBOX\.b"),
}
CALL = re.compile(r"^(\d+)\s+(?:<\.\.\. )?(\w+)(?:\(| resumed>)(.*)$")


class Proof(msgspec.Struct):
    peer: str
    sequential: int = 0  # acknowledgements seen on the wire, one at a time
    synced_first: int = 0  # of these, how many had a sync finished since the one before
    syncs_each: float = 0.0  # sync calls per append, one at a time
    appends_concurrent: int = 0
    syncs_concurrent: int = 0
    calls: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.note:
            return self.note
        if self.sequential and self.synced_first == self.sequential:
            return "yes"
        return "no" if self.synced_first == 0 else f"for {self.synced_first} of {self.sequential}"


class Trace:
    """Reads an strace log line by line: finished syncs and acknowledgements, in the order they happened."""

    def __init__(self, wire: Wire) -> None:
        self.acknowledgement = ACKNOWLEDGEMENT[wire]
        self.begun: dict[tuple[str, str], str] = {}
        self.synchronous_fds: set[str] = set()
        self.events: list[str] = []  # "ack", or the name of a sync call

    def line(self, text: str) -> None:
        match = CALL.match(text)
        if match is None:
            return
        thread, call, rest = match.groups()
        # What a call sends is known when it begins; that a sync is done only when it returns.
        if "resumed>" not in text.split("(", 1)[0]:
            if call in ("write", "writev", "sendto", "sendmsg") and self.acknowledgement.search(rest):
                self.events += ["ack"] * len(self.acknowledgement.findall(rest))
                return
            if rest.endswith("<unfinished ...>"):
                self.begun[thread, call] = rest
                return
        else:
            rest = self.begun.pop((thread, call), "") + rest
        self._finished(call, rest)

    def _finished(self, call: str, rest: str) -> None:
        result = rest.rpartition("= ")[2].split(" ")[0]
        if call == "openat" and ("O_DSYNC" in rest or "O_SYNC" in rest) and result.isdigit():
            self.synchronous_fds.add(result)
        elif call == "openat":
            self.synchronous_fds.discard(result)
        elif call in SYNCS and result == "0":
            self.events.append(call)
        elif "RWF_DSYNC" in rest or "RWF_SYNC" in rest:
            self.events.append(f"{call} RWF_DSYNC")
        elif call in WRITES and rest.partition(",")[0] in self.synchronous_fds:
            self.events.append(f"{call} O_DSYNC")


def _read(path: Path, wire: Wire, start: int) -> tuple[list[str], int]:
    """Events from a position on; openat lines are read from the beginning, to know the O_DSYNC files."""
    trace = Trace(wire)
    with path.open(errors="replace") as log:
        text = log.read()
    head, tail = text[:start], text[start:]
    for line in head.splitlines():
        if "openat" in line:
            trace.line(line)
    trace.events.clear()
    for line in tail.splitlines():
        trace.line(line)
    return trace.events, len(text)


def _sequential(proof: Proof, events: list[str]) -> None:
    since = 0
    for event in events:
        if event == "ack":
            proof.sequential += 1
            proof.synced_first += since > 0
            since = 0
        else:
            since += 1
            proof.calls[event] = proof.calls.get(event, 0) + 1
    proof.syncs_each = sum(proof.calls.values()) / SEQUENTIAL


def prove(peer: Peer) -> Proof:
    directory = DATA / f"strace-{peer.name}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    log, generator, proof = directory / "trace", Generator(None), Proof(peer.name)
    prefix = (
        "strace",
        "-D",  # the server stays our own child, so that it can be stopped
        "-f",
        "-qq",
        "-s",
        "64",
        "-e",
        "trace=" + ",".join(TRACED),
        "-e",
        "signal=none",
        "-o",
        str(log),
    )
    options = append_options(peer.wire)
    server = peer.start(directory, None, prefix=prefix)
    try:
        generator.run(server.port, connections=1, count=2, **options)
        _, start = _read(log, peer.wire, 0)
        again = {**options, "create": False}
        generator.run(server.port, connections=1, count=SEQUENTIAL, **again)
        events, start = _read(log, peer.wire, start)
        _sequential(proof, events)
        load = generator.run(server.port, connections=CONNECTIONS, count=CONCURRENT, **again)
        events, _ = _read(log, peer.wire, start)
        proof.appends_concurrent = load.ops
        proof.syncs_concurrent = sum(event != "ack" for event in events)
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)
    return proof


def lines(proofs: list[Proof]) -> list[str]:
    grouped_head = f"appends per sync, {CONNECTIONS} connections"
    heads = f"| server | synced before acknowledging | syncs per append, alone | {grouped_head} | calls |"
    out = [heads, "|---|---|---:|---:|---|"]
    for proof in proofs:
        calls = ", ".join(f"{name} x{count}" for name, count in sorted(proof.calls.items())) or "none"
        grouped = f"{proof.appends_concurrent / proof.syncs_concurrent:.1f}" if proof.syncs_concurrent else ""
        title = peers.ALL[proof.peer].title
        out.append(f"| {title} | {proof.verdict} | {proof.syncs_each:.2f} | {grouped} | {calls} |")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description="does each peer sync before it acknowledges?")
    parser.add_argument("--peers", default=",".join(peers.ALL))
    names = [name for name in str(parser.parse_args().peers).split(",") if name]
    install.main()
    if shutil.which("strace") is None:
        print("bench: strace is not installed", file=sys.stderr)
        return 1
    proofs: list[Proof] = []
    for name in names:
        print(f"bench: tracing {name}", file=sys.stderr, flush=True)
        try:
            proofs.append(prove(peers.ALL[name]))
        except (PeerError, install.UnavailableError) as failure:
            proofs.append(Proof(name, note=f"not measured: {failure}"))
    text = "\n".join(lines(proofs)) + "\n"
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "strace.md").write_text(text)
    (RESULTS / "strace.json").write_bytes(msgspec.json.format(msgspec.json.encode(proofs), indent=1))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
