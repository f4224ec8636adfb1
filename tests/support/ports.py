"""Ports of loopback that stay with the test that got them."""

from __future__ import annotations

import os
import socket
import weakref


class KeptPort:
    """A port for somebody who listens later, or again; let go with this object.

    A socket that is bound and does not listen keeps it. The kernel gives such a port to nobody who asks for
    any, be it another test's server or a connection that goes out. Who asks for this one may listen on it,
    with SO_REUSEADDR or SO_REUSEPORT, as servers do; while nobody does, connections are refused.
    """

    def __init__(self) -> None:
        with socket.socket() as keeper:
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                keeper.setsockopt(socket.SOL_SOCKET, option, 1)
            keeper.bind(("127.0.0.1", 0))
            self.number: int = keeper.getsockname()[1]
            weakref.finalize(self, os.close, keeper.detach())


_kept: list[KeptPort] = []


def free_port() -> int:
    """A port that nobody listens on, kept until this process ends."""
    _kept.append(KeptPort())
    return _kept[-1].number
