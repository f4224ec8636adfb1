"""File descriptors: how many this process may have open, and how many of them connections may take.

A connection that is accepted takes a descriptor, and so does every file. Without a bound below the limit of
the system, idle connections take all of them, and the journal cannot begin its next file.
"""

from __future__ import annotations

import logging
import resource
from typing import Final

import msgspec

from tailrace.common.limits import Limits

logger = logging.getLogger("tailrace")

# For journal, hot store, caches of segments, pipes to helpers, and connections that the server makes itself:
# an eighth of all, within these bounds.
RESERVED_FILES_MIN: Final = 256
RESERVED_FILES_MAX: Final = 1024
# Beyond the connections that are served, as parts of them: those that are accepted only to be refused, and
# those that wait to be accepted, all of which may be accepted before the first is refused.
REFUSED_FRACTION: Final = 16
BACKLOG_FRACTION: Final = 4


def raise_open_files_limit() -> int:
    """Raises the soft limit of open files to the hard one; the answer is how many files may be open."""
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
    """Connections that a process may serve which may have so many files open, and makes so many sockets."""
    if allowed == resource.RLIM_INFINITY:
        return 2**31
    files = min(max(RESERVED_FILES_MIN, allowed // 8), RESERVED_FILES_MAX, allowed // 2) + sockets
    return int((allowed - files) / (1 + 1 / REFUSED_FRACTION + 1 / BACKLOG_FRACTION))


def fit_edge_limits(limits: Limits) -> Limits:
    """As `fitted`, for an edge: it has sockets of its own, one for each stream that it follows."""
    allowed = raise_open_files_limit()
    channels = (
        limits.edge_channels if allowed == resource.RLIM_INFINITY else min(limits.edge_channels, allowed // 4)
    )
    return fit_connection_limit(msgspec.structs.replace(limits, edge_channels=channels), channels)


def fit_connection_limit(limits: Limits, sockets: int = 0) -> Limits:
    """Limits with no more connections than descriptors allow, after all that can be had were asked for.

    `sockets` are those that the process makes itself, beyond a few.
    """
    allowed = raise_open_files_limit()
    fits = connections_allowed(allowed, sockets)
    if fits >= limits.connections:
        return limits
    fields = {"file_descriptors": allowed, "connections": fits, "wanted": limits.connections}
    logger.warning(
        "the file descriptor limit allows fewer connections than the setting; raise ulimit -n or LimitNOFILE",
        extra={"fields": fields},
    )
    return msgspec.structs.replace(limits, connections=fits)


def refused_connections_max(connections: int) -> int:
    """Connections over the limit that are answered before further ones are dropped."""
    return max(1, min(256, connections // REFUSED_FRACTION))


def accept_backlog(connections: int) -> int:
    """Connections that may wait to be accepted."""
    return max(16, min(4096, connections // BACKLOG_FRACTION))
