# pyright: strict
"""All readings of one run, and their medians."""

from __future__ import annotations

import statistics

import msgspec

from bench.floor import Bare, Floor
from bench.machine import Machine


class Series(msgspec.Struct):
    """One row of one scenario: the readings of each peer, one per round."""

    scenario: str
    group: str
    title: str
    row: str
    metric: str
    unit: str
    higher_is_better: bool
    readings: dict[str, list[dict[str, float]]] = msgspec.field(
        default_factory=dict[str, list[dict[str, float]]]
    )

    def values(self, peer: str, metric: str | None = None) -> list[float]:
        key = metric or self.metric
        return [reading[key] for reading in self.readings.get(peer, []) if key in reading]

    def median(self, peer: str, metric: str | None = None) -> float | None:
        values = self.values(peer, metric)
        return statistics.median(values) if values else None

    def ratio(self, us: str, peer: str) -> float | None:
        """How many times better we are; below 1 the peer is better."""
        ours, theirs = self.median(us), self.median(peer)
        if not ours or not theirs:
            return None
        return ours / theirs if self.higher_is_better else theirs / ours


class Results(msgspec.Struct):
    machine: Machine
    conditions: dict[str, str | int | float]
    floor: Floor
    disk_after: Bare | None = None
    series: list[Series] = msgspec.field(default_factory=list[Series])
    failures: list[str] = msgspec.field(default_factory=list[str])

    def find(self, scenario: str, row: str) -> Series | None:
        return next((s for s in self.series if s.scenario == scenario and s.row == row), None)
