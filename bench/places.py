# pyright: strict
"""Where the benches keep their tools, peers and data."""

from __future__ import annotations

from pathlib import Path

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
BUILD = BENCH / "build"
PEERS = BENCH / ".peers"
NODE_MODULES = BENCH / "node_modules"
LOAD = BUILD / "load"
HUBLOAD = BUILD / "hubload"
BARE = BUILD / "bare"
SLOWSYNC = BUILD / "slowsync.so"
DATA = BUILD / "data"
RESULTS = BUILD / "results"
