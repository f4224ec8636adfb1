"""The port that all workers share: seen to be free, and kept, before anything else is done."""

from __future__ import annotations

import errno
import socket
import time
from typing import Final

from tailrace.common.errors import TailraceError

PORT_S_MAX: Final = 5.0
PORT_RETRY_S: Final = 0.05


def reserve_port(host: str, port: int) -> socket.socket:
    """Bound and never listened on: the port stays ours while workers come and go."""
    deadline = time.monotonic() + PORT_S_MAX
    while True:
        try:
            return _bind(host, port)
        except OSError as error:
            # Workers of a supervisor that was killed a moment ago may still be letting go.
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(PORT_RETRY_S)
                continue
            reason = error.strerror or error
            raise TailraceError("unavailable", f"cannot listen on {host} port {port}: {reason}") from error


def _bind(host: str, port: int) -> socket.socket:
    """A socket on the address. That nobody else listens there is seen without sharing it first."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    if port:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    bound = socket.socket(family, kind, protocol)
    try:
        # The first for connections of a server that has just left, and did not share the port.
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
