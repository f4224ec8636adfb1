"""The rule that keeps an open server off the network."""

from __future__ import annotations

from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings


def check_listen_address(settings: Settings) -> None:
    """Refuses to listen beyond this machine without authentication, unless that is asked for by name."""
    if settings.loopback_only or settings.auth_configured or settings.insecure:
        return
    raise TailraceError(
        "invalid_request",
        f"refusing to listen on {settings.host!r} without authentication: anyone who reaches it could read, "
        "write and delete everything. Set TAILRACE_AUTH_JWT_SECRET (32 bytes or more), "
        "TAILRACE_AUTH_JWKS_URL, TAILRACE_AUTH_JWKS_FILE or TAILRACE_AUTH_KEYS_FILE; or listen on 127.0.0.1; "
        "or pass --insecure if something else guards the port.",
    )
