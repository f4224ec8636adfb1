"""File descriptors: how many this process may open, and how many of them connections may use.

Connections and files share one limit. Without a lower bound for connections, idle ones could use all
descriptors, and the journal could not open its next file.
"""

from __future__ import annotations

import logging
import resource
from typing import Final

import msgspec

from tailrace.common.limits import Limits

logger = logging.getLogger("tailrace")

# Reserved for the journal, the hot store, segment caches, pipes to helper processes and outgoing connections:
# an eighth of all, within these bounds.
RESERVED_FILES_MIN: Final = 256
RESERVED_FILES_MAX: Final = 1024
# Further connections, as fractions of the served ones: those accepted only to be refused, and those in the
# accept backlog, all of which may be accepted before the first is refused.
REFUSED_FRACTION: Final = 16
BACKLOG_FRACTION: Final = 4


def raise_open_files_limit() -> int:
    """Raise the soft limit of open files to the hard one and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            logger.warning("cannot raise the file descriptor limit", extra={"fields": {"error": str(error)}})
        else:
            soft = hard
    return soft


def connections_allowed(allowed: int, sockets: int = 0) -> int:
    """Connections that a process with `allowed` descriptors may serve, besides `sockets` of its own."""
    if allowed == resource.RLIM_INFINITY:
        return 2**31
    files = min(max(RESERVED_FILES_MIN, allowed // 8), RESERVED_FILES_MAX, allowed // 2) + sockets
    return int((allowed - files) / (1 + 1 / REFUSED_FRACTION + 1 / BACKLOG_FRACTION))


def fit_edge_limits(limits: Limits) -> Limits:
    """As `fit_connection_limit`, for an edge, which also needs a socket for each followed stream."""
    allowed = raise_open_files_limit()
    channels = (
        limits.edge_channels if allowed == resource.RLIM_INFINITY else min(limits.edge_channels, allowed // 4)
    )
    return fit_connection_limit(msgspec.structs.replace(limits, edge_channels=channels), channels)


def fit_connection_limit(limits: Limits, sockets: int = 0) -> Limits:
    """Lower the connection limit to what the file descriptor limit allows, after raising that.

    `sockets` is the number of outgoing connections of the process, beyond a few.
    """
    allowed = raise_open_files_limit()
    fits = connections_allowed(allowed, sockets)
    if fits >= limits.connections:
        return limits
    fields = {"file_descriptors": allowed, "connections": fits, "connections_setting": limits.connections}
    logger.warning(
        "file descriptor limit allows fewer connections than the setting, raise ulimit -n or LimitNOFILE",
        extra={"fields": fields},
    )
    return msgspec.structs.replace(limits, connections=fits)


def refused_connections_max(connections: int) -> int:
    """Connections over the limit that get an error response before further ones are dropped."""
    return max(1, min(256, connections // REFUSED_FRACTION))


def accept_backlog(connections: int) -> int:
    """Length of the accept backlog."""
    return max(16, min(4096, connections // BACKLOG_FRACTION))
