"""Checks of webhook URLs against server-side request forgery.

A URL is checked by its text, then by every address its host resolves to, before each delivery. Connections
are made to the checked addresses, so that a name cannot pass the check and then resolve to another address.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import urlsplit

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Sequence[str]]

ADDRESSES_MAX: Final = 16
# Characters that cannot be mistaken for a second request or another host.
_URL_TEXT: Final = re.compile(r"[!-~]+")
# A longer label is invalid; its lookup would fail with another kind of error.
_LABEL: Final = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_TEXT: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
# Translators of local networks: the position of the IPv4 address is not standardised.
_LOCAL_NAT64: Final = ipaddress.IPv6Network("64:ff9b:1::/48")


class UrlRules(msgspec.Struct, frozen=True):
    """The operator's settings: whether loopback may be called, and private hosts that may be called."""

    loopback: bool = False
    allowed: frozenset[tuple[str, str]] = frozenset()  # (scheme, host)


class WebhookTarget(msgspec.Struct, frozen=True):
    """A URL whose text passed the check."""

    scheme: str
    host: str  # lower case, without brackets or final dot
    port: int
    path: str  # with query, never empty
    authority: str  # the Host header
    any_address: bool  # allow-listed: any address is accepted
    loopback: bool  # must resolve to loopback addresses only


def rejected_url(reason: str) -> TailraceError:
    return TailraceError("WEBHOOK_URL_REJECTED", reason)


def url_rules(settings: Settings) -> UrlRules:
    """`webhook_allow` lists hosts for https; `http://host` also allows plain HTTP."""
    allowed: set[tuple[str, str]] = set()
    for item in settings.webhook_allow.split(","):
        scheme, separator, host = item.strip().lower().rpartition("://")
        host = host.strip("/").removeprefix("[").removesuffix("]").removesuffix(".")
        if host:
            allowed.add(("https", host))
            if separator and scheme == "http":
                allowed.add(("http", host))
    return UrlRules(loopback=settings.loopback_webhooks_allowed, allowed=frozenset(allowed))


def check_url(url: str, rules: UrlRules) -> WebhookTarget:
    """Check the text of a URL; names are resolved later, by `check_addresses`."""
    if not _URL_TEXT.fullmatch(url) or "\\" in url:
        raise rejected_url("the webhook URL has characters that must be percent-encoded")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").removesuffix("."), parts.port
    except ValueError:
        raise rejected_url("the webhook URL is malformed") from None
    if "@" in parts.netloc:
        raise rejected_url("the webhook URL must not contain user information")
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise rejected_url("the webhook URL must be https://host/...")
    address = parse_ip(host)
    if address is None and (not _HOST_TEXT.fullmatch(host) or _looks_numeric(host)):
        raise rejected_url("the host of the webhook URL must be a name or an address")
    any_address = (parts.scheme, host) in rules.allowed
    loopback = (
        not any_address
        and parts.scheme == "http"
        and rules.loopback
        and (host == "localhost" or (isinstance(address, ipaddress.IPv4Address) and address.is_loopback))
    )
    if not any_address and not loopback:
        if parts.scheme != "https":
            raise rejected_url("the webhook URL must be https")
        if host == "localhost" or (address is not None and not is_public(address)):
            raise rejected_url("the webhook URL points to a private or reserved address")
    return WebhookTarget(
        scheme=parts.scheme,
        host=host,
        port=port or (443 if parts.scheme == "https" else 80),
        path=(parts.path or "/") + (f"?{parts.query}" if parts.query else ""),
        authority=parts.netloc,
        any_address=any_address,
        loopback=loopback,
    )


def check_addresses(target: WebhookTarget, resolved: Sequence[str]) -> list[str]:
    """The addresses to connect to. One rejected address rejects all, as a later lookup could return it."""
    addresses = [parse_ip(text.partition("%")[0]) for text in resolved[:ADDRESSES_MAX]]
    good: list[str] = []
    for address in addresses:
        if address is None:
            raise rejected_url("the webhook host did not resolve to an address")
        if target.loopback:
            if not address.is_loopback:
                raise rejected_url("the webhook host is not a loopback address")
        elif not target.any_address and not is_public(address):
            raise rejected_url("the webhook host resolves to a private or reserved address")
        good.append(str(address))
    return good


def resolve_host(host: str, port: int) -> list[str]:
    """All addresses of a host, in the system's order of preference. Blocks; OSError if there are none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(str(item[4][0]) for item in found))


def check_target(target: WebhookTarget, resolver: Resolver = resolve_host) -> list[str]:
    """Resolve and check; OSError if the name does not resolve. Blocks, so it runs off the loop."""
    if parse_ip(target.host) is not None:
        return check_addresses(target, [target.host])
    return check_addresses(target, resolver(target.host, target.port))


def parse_ip(host: str) -> IpAddress | None:
    """A literal address in standard notation; zones are not accepted."""
    if "%" in host:
        return None
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_public(address: IpAddress) -> bool:
    """Whether an address is public, including all forms that embed an IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        embedded = address.ipv4_mapped or address.sixtofour
        if embedded is None and address in _NAT64:
            embedded = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if embedded is not None:
            return is_public(embedded)
        if address.teredo is not None or address.is_site_local or address in _LOCAL_NAT64:
            return False
        if int(address) >> 32 == 0:  # ::a.b.c.d, the old compatible form
            return False
    return address.is_global and not (
        address.is_multicast
        or address.is_reserved
        or address.is_unspecified
        or address.is_loopback
        or address.is_link_local
        or address.is_private
    )


def _looks_numeric(host: str) -> bool:
    """`127.1`, `0x7f000001`, `017700000001`: other notations of IPv4 that resolvers accept."""
    last = host.rpartition(".")[2]
    return last.isdigit() or re.fullmatch(r"0x[0-9a-f]*", last) is not None
