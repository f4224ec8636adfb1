# pyright: strict
"""The list of scenarios, in the order they run and are reported."""

from __future__ import annotations

from bench.history import cold_reads, sealing
from bench.hub.scenarios import SCENARIOS as HUB
from bench.idle import idle_streams
from bench.scenarios import Scenario, appends, fanout, json_arrays, latency, reads, slow_disk

EVERYONE = ("tailrace", "redis", "prisma-raised", "prisma", "reference-file", "reference-memory", "nats")
HTTP = ("tailrace", "prisma-raised", "reference-file", "reference-memory")

SCENARIOS: tuple[Scenario, ...] = (
    *(
        Scenario(
            f"appends-{connections}-{streams}",
            "appends",
            "Appends of 100 B, acknowledged when durable",
            "ops_per_s",
            "appends/s",
            True,
            EVERYONE,
            appends(connections, streams),
        )
        for streams in (1, 100)
        for connections in (64, 256)
    ),
    Scenario(
        "latency",
        "latency",
        "One connection, one append after the other",
        "p50_us",
        "µs, p50",
        False,
        (*EVERYONE, "bare"),
        latency,
    ),
    Scenario(
        "arrays",
        "arrays",
        "JSON arrays of 100 messages of 100 B",
        "messages_per_s",
        "messages/s",
        True,
        HTTP,
        json_arrays,
    ),
    Scenario(
        "reads-json",
        "reads",
        "Catch-up reads, JSON messages of 1 KiB",
        "bytes_per_s",
        "bytes/s",
        True,
        HTTP,
        reads("json"),
    ),
    Scenario(
        "reads-bytes",
        "reads",
        "Catch-up reads, byte messages of 1 KiB",
        "bytes_per_s",
        "bytes/s",
        True,
        ("tailrace", "prisma-raised", "reference-memory", "redis"),
        reads("bytes"),
    ),
    Scenario(
        "fanout",
        "fanout",
        "SSE fan-out: delivery after the message was due",
        "p99_us",
        "µs, p99",
        False,
        HTTP,
        fanout,
    ),
    Scenario(
        "idle",
        "idle",
        "Streams created and idle",
        "rss_mb",
        "MB resident",
        False,
        ("tailrace", "redis", "prisma-raised"),
        idle_streams,
        rounds_max=3,
    ),
    *(
        Scenario(
            f"slow-disk-{connections}{'-serial' if serial else ''}",
            "slow-disk",
            "5 ms added to every sync; reads beside the appends",
            "ops_per_s",
            "appends/s",
            True,
            ("tailrace", "redis", "prisma-raised"),
            slow_disk(serial, connections),
        )
        for serial in (False, True)
        for connections in (64, 256)
    ),
    Scenario(
        "sealing",
        "sealing",
        "Appends while history is sealed beside them",
        "ops_per_s",
        "appends/s",
        True,
        ("tailrace",),
        sealing,
    ),
    *(
        Scenario(
            f"history-{store}",
            "history",
            f"First read of a long history after a restart, {place}",
            "bytes_per_s",
            "bytes/s",
            True,
            peers,
            cold_reads(store),
            rounds_max=2,
        )
        for store, place, peers in (
            ("file", "from local files", ("tailrace", "prisma-raised", "reference-file")),
            ("s3", "Tailrace from an S3 server on the same machine", ("tailrace",)),
        )
    ),
    *HUB,
)
GROUPS = tuple(dict.fromkeys(scenario.group for scenario in SCENARIOS))
