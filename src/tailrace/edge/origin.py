"""Where an upstream is: its address, and the name by which streams are placed on it."""

from __future__ import annotations

import re
import ssl
from typing import NamedTuple
from urllib.parse import urlsplit

from tailrace.common.settings import SettingsError

_NAMED = re.compile(r"([A-Za-z0-9._-]+)=(https?://.*)")


class UpstreamAddress(NamedTuple):
    """One upstream as it was given: `URL` or `name=URL`."""

    id: str
    host: str
    port: int
    tls: ssl.SSLContext | None

    @property
    def host_header(self) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}".encode()


def parse_upstreams(text: str) -> list[UpstreamAddress]:
    """The upstreams of a comma-separated list; refuses what cannot be one."""
    items = [text] if "@" in text else text.split(",")  # whose password may have a comma
    origins = [_parse_upstream(item.strip()) for item in items if item.strip()]
    if not origins:
        raise SettingsError("an edge needs an upstream: tailrace edge --upstream http://host:4437")
    if len({origin.id for origin in origins}) != len(origins):
        raise SettingsError("an upstream is named twice")
    return origins


def _parse_upstream(text: str) -> UpstreamAddress:
    named = _NAMED.fullmatch(text)
    url = named[2] if named else text
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    plain = parts.path in ("", "/") and not parts.query and not parts.username and not parts.password
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or not plain:
        raise SettingsError(f"an upstream is given as http://host:port or https://host:port{_redacted(text)}")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    port = port or (443 if tls else 80)
    shown = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return UpstreamAddress(
        named[1] if named else f"{parts.scheme}://{shown}:{port}", parts.hostname, port, tls
    )


def _redacted(text: str) -> str:
    """What was given instead, if that may be shown: a password in it is nobody's business."""
    return ", without a user or a password" if "@" in text else f", not {text.partition('?')[0]!r}"
