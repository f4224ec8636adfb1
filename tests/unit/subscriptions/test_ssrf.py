from __future__ import annotations

import ipaddress

import pytest

from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings
from tailrace.subscriptions import ssrf

STRICT = ssrf.UrlRules()
LOOPBACK = ssrf.UrlRules(loopback=True)


def assert_rejected(url: str, rules: ssrf.UrlRules) -> None:
    with pytest.raises(TailraceError) as caught:
        ssrf.check_url(url, rules)
    assert caught.value.code == "WEBHOOK_URL_REJECTED"
    assert caught.value.status == 400


def test_a_public_https_url_is_fine() -> None:
    target = ssrf.check_url("https://Worker.Example:8443/hook/a?b=c&d=%20#part", STRICT)
    assert target.host == "worker.example"
    assert target.port == 8443
    assert target.path == "/hook/a?b=c&d=%20"
    assert target.authority == "Worker.Example:8443"
    assert ssrf.check_url("https://worker.example", STRICT).path == "/"
    assert ssrf.check_url("https://worker.example", STRICT).port == 443
    assert ssrf.check_url("https://worker.example./", STRICT).host == "worker.example"
    assert ssrf.check_url(f"https://{'a' * 63}.example/", STRICT).host.startswith("aaa")
    assert ssrf.check_url("https://93.184.216.34/x", STRICT).host == "93.184.216.34"
    assert ssrf.check_url("https://[2606:2800:220:1::1]/x", STRICT).host == "2606:2800:220:1::1"


@pytest.mark.parametrize("rules", [STRICT, LOOPBACK])
@pytest.mark.parametrize(
    "url",
    [
        "http://worker.example/hook",
        f"https://{'a' * 64}.example/hook",
        "http://10.0.0.1/hook",
        "https://10.0.0.1/hook",
        "https://172.16.0.1/",
        "https://192.168.1.1/",
        "https://127.0.0.1/",
        "https://localhost/",
        "https://LOCALHOST./",
        "https://169.254.169.254/latest/meta-data",
        "http://169.254.169.254/",
        "https://100.64.0.1/",
        "https://0.0.0.0/",
        "https://224.0.0.1/",
        "https://239.255.255.250/",
        "https://255.255.255.255/",
        "https://240.0.0.1/",
        "https://198.18.0.1/",
        "https://192.0.2.1/",
        "https://[::]/",
        "https://[::1]/",
        "http://[::1]/",
        "https://[fe80::1]/",
        "https://[fe80::1%25eth0]/",
        "https://[fc00::1]/",
        "https://[fec0::1]/",
        "https://[ff02::1]/",
        "https://[ff0e::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://[::ffff:10.0.0.1]/",
        "http://[::ffff:127.0.0.1]/",
        "https://[::127.0.0.1]/",
        "https://[64:ff9b::10.0.0.1]/",
        "https://[64:ff9b:1::10.0.0.1]/",
        "https://[64:ff9b:1:a00::1]/",
        "https://[2002:0a00:0001::]/",
        "https://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/",
        "https://[2001:db8::1]/",
        "https://2130706433/",
        "https://127.1/",
        "https://0x7f.0.0.1/",
        "https://0x7f000001/",
        "https://017700000001/",
        "https://127.0.0.1./",
        "https://user@worker.example/",
        "https://user:secret@worker.example/",
        "https://@worker.example/",
        "https://worker.example@10.0.0.1/",
        "https://worker.example:0/",
        "https://worker.example:99999/",
        "https://worker.example:x/",
        "https:///hook",
        "https://",
        "//worker.example/",
        "worker.example/hook",
        "ftp://worker.example/",
        "file:///etc/passwd",
        "gopher://worker.example/",
        "",
        "https://worker.example/a b",
        "https://worker.example/\r\nX: y",
        "https://worker.example\\@10.0.0.1/",
        "https://worker.example/\u00e4",
        "https://w\u00f6rker.example/",
        "https://-bad.example/",
        "https://bad..example/",
        "https://[not-an-address]/",
        "https://[::1/",
    ],
)
def test_urls_that_must_not_be_called(url: str, rules: ssrf.UrlRules) -> None:
    assert_rejected(url, rules)


def test_loopback_is_for_servers_on_loopback() -> None:
    for url in (
        "http://localhost:9000/hook",
        "http://127.0.0.1:9000/hook",
        "http://127.8.7.6/",
        "http://LocalHost/",
    ):
        assert ssrf.check_url(url, LOOPBACK).loopback
        assert_rejected(url, STRICT)
    target = ssrf.check_url("http://localhost/hook", LOOPBACK)
    assert ssrf.check_target(target, lambda *_: ["::1", "127.0.0.1"]) == ["::1", "127.0.0.1"]
    with pytest.raises(TailraceError, match="not a loopback address"):
        ssrf.check_target(target, lambda *_: ["127.0.0.1", "10.0.0.1"])


def test_settings_make_the_rules() -> None:
    assert ssrf.url_rules(Settings()).loopback
    assert not ssrf.url_rules(Settings(host="0.0.0.0")).loopback
    assert not ssrf.url_rules(Settings(loopback_webhooks="no")).loopback
    rules = ssrf.url_rules(Settings(webhook_allow="worker.internal, http://Plain.internal/ ,10.0.0.7,,"))
    assert ssrf.check_url("https://worker.internal/", rules).any_address
    assert ssrf.check_url("http://plain.internal:8080/x", rules).any_address
    assert ssrf.check_url("https://plain.internal/x", rules).any_address
    assert ssrf.check_url("https://10.0.0.7/", rules).any_address
    assert_rejected("http://worker.internal/", rules)
    assert_rejected("https://10.0.0.8/", rules)
    target = ssrf.check_url("https://worker.internal/", rules)
    assert ssrf.check_target(target, lambda *_: ["10.1.2.3"]) == ["10.1.2.3"]


@pytest.mark.parametrize(
    "addresses",
    [
        ["10.0.0.1"],
        ["93.184.216.34", "127.0.0.1"],
        ["::1"],
        ["169.254.169.254"],
        ["fe80::1%eth0"],
        ["::ffff:192.168.0.1"],
        ["not an address"],
    ],
)
def test_names_are_judged_by_every_address(addresses: list[str]) -> None:
    target = ssrf.check_url("https://worker.example/", STRICT)
    with pytest.raises(TailraceError) as caught:
        ssrf.check_target(target, lambda *_: addresses)
    assert caught.value.code == "WEBHOOK_URL_REJECTED"


def test_good_names_give_the_addresses_to_connect_to() -> None:
    target = ssrf.check_url("https://worker.example:444/", STRICT)
    asked: list[tuple[str, int]] = []

    def resolver(host: str, port: int) -> list[str]:
        asked.append((host, port))
        return ["93.184.216.34", "2606:2800:220:1::1"]

    assert ssrf.check_target(target, resolver) == ["93.184.216.34", "2606:2800:220:1::1"]
    assert asked == [("worker.example", 444)]
    literal = ssrf.check_url("https://93.184.216.34/", STRICT)
    assert ssrf.check_target(literal, resolver) == ["93.184.216.34"]
    assert len(asked) == 1


def test_the_system_resolver_knows_this_machine() -> None:
    found = ssrf.resolve_host("localhost", 80)
    assert found
    assert all(ipaddress.ip_address(text).is_loopback for text in found)
