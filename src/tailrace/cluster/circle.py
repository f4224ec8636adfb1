"""What a worker knows of the others, itself included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tailrace.cluster.placement import Placement
from tailrace.http.relay import PeerClient


class Peers(NamedTuple):
    own: int  # number of this worker
    placement: Placement
    peers: Mapping[
        int, PeerClient
    ]  # this worker among them: what is asked of all is asked of it in the same way
    doors: Mapping[int, str]  # where each takes connections that another accepted, by path
