"""What proxies say of their clients, and whose word counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tailrace.common.settings import SettingsError
from tailrace.common.settings_loading import load_settings
from tailrace.http.exchange import Exchange
from tailrace.routing.client_address import TrustedProxies, client_network

TRUSTED = "10.0.0.0/8, 192.0.2.7, fd00::/8"


def exchange(peer: str, scheme: str = "http", **headers: str) -> Exchange:
    named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    made: Any = SimpleNamespace(peer=peer, scheme=scheme.encode(), headers=named)
    return cast("Exchange", made)


@pytest.mark.parametrize(
    ("peer", "said", "client"),
    [
        ("10.1.2.3:5", "203.0.113.9", "203.0.113.9"),
        ("10.1.2.3:5", "6.6.6.6, 203.0.113.9", "203.0.113.9"),  # the first one was said by the client
        ("10.1.2.3:5", "203.0.113.9, 192.0.2.7", "203.0.113.9"),
        ("10.1.2.3:5", "10.9.9.9, 192.0.2.7", "10.9.9.9"),
        ("10.1.2.3:5", "203.0.113.9:4711", "203.0.113.9"),
        ("10.1.2.3:5", "[2001:db8::1]:4711", "2001:db8::1"),
        ("fd00::1:5", "2001:db8::1", "2001:db8::1"),
        ("::ffff:10.1.2.3:5", "203.0.113.9", "203.0.113.9"),
        ("10.1.2.3:5", "nonsense", "10.1.2.3"),
        ("10.1.2.3:5", "203.0.113.9, nonsense", "10.1.2.3"),
        ("203.0.113.1:5", "198.51.100.1", "203.0.113.1"),  # a stranger
        ("", "198.51.100.1", ""),
    ],
)
def test_the_client_is_the_last_one_that_is_no_proxy(peer: str, said: str, client: str) -> None:
    assert TrustedProxies(TRUSTED).address_of(exchange(peer, x_forwarded_for=said)) == client
    assert TrustedProxies("").address_of(exchange(peer, x_forwarded_for=said)) == peer.rpartition(":")[0]


def test_a_client_is_written_down_with_its_port_unless_a_proxy_stands_between() -> None:
    said = {"x_forwarded_for": "203.0.113.9"}
    assert TrustedProxies(TRUSTED).remote_of(exchange("10.1.2.3:5", **said)) == "203.0.113.9"
    assert TrustedProxies(TRUSTED).remote_of(exchange("10.1.2.3:5")) == "10.1.2.3:5"
    assert TrustedProxies("").remote_of(exchange("10.1.2.3:5", **said)) == "10.1.2.3:5"


def test_scheme_and_host_are_those_that_the_proxy_was_reached_by() -> None:
    said = {"x_forwarded_proto": "https", "x_forwarded_host": "api.example:8443", "host": "inside:4437"}
    proxies = TrustedProxies(TRUSTED)
    assert proxies.base_of(exchange("10.0.0.1:5", **said)) == ("https", "api.example:8443")
    assert proxies.base_of(exchange("203.0.113.1:5", **said)) == ("http", "inside:4437")
    assert TrustedProxies("").base_of(exchange("10.0.0.1:5", **said)) == ("http", "inside:4437")
    several = {**said, "x_forwarded_proto": "http, https", "x_forwarded_host": "evil.example, api.example"}
    assert proxies.base_of(exchange("10.0.0.1:5", **several)) == ("https", "api.example")
    wrong = {**said, "x_forwarded_proto": "javascript", "x_forwarded_host": 'a"b/c@d'}
    assert proxies.base_of(exchange("10.0.0.1:5", **wrong)) == ("http", "inside:4437")


def test_whoever_has_many_addresses_is_counted_once() -> None:
    assert client_network("2001:db8:1:2:3::4") == client_network("2001:db8:1:2::9") == "2001:db8:1:2::/64"
    assert client_network("2001:db8:1:3::4") != client_network("2001:db8:1:2::4")
    assert client_network("::ffff:192.0.2.1") == client_network("192.0.2.1") == "192.0.2.1"
    assert client_network("") == ""


def test_what_is_no_network_is_refused_at_start() -> None:
    with pytest.raises(SettingsError, match="trusted_proxies"):
        load_settings({"trusted_proxies": "10.0.0.0/8, proxy.example"}, env={})
    assert load_settings({"trusted_proxies": TRUSTED}, env={}).trusted_proxies == TRUSTED
