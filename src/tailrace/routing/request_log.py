"""The log of requests, with the clients for whom edges have asked."""

from __future__ import annotations

from tailrace.http import request_log
from tailrace.http.exchange import Exchange
from tailrace.http.request_log import LogFields, RequestLogMode, failure_log
from tailrace.routing.client_address import ClientResolver, TrustedProxies

__all__ = ["answered", "configure", "failure_log"]


_vouching = ClientResolver("")


def configure(choice: RequestLogMode, edge_key: str = "") -> None:
    """`edge_key` is what edges sign their word about clients with; without it they are not believed."""
    global _vouching
    _vouching = ClientResolver(edge_key)
    request_log.configure_request_log(choice, _client)


def trust(proxies: TrustedProxies) -> None:
    """Whose word about clients the log may repeat."""
    _vouching.proxies = proxies


def answered(exchange: Exchange, status: int, seconds: float) -> None:
    """A line of the log of all requests. Failures have theirs already, with the reason."""
    if status < 500:
        request_log.log_request(exchange, status, seconds)


def _client(exchange: Exchange) -> LogFields:
    vouched = _vouching.client_of(exchange)
    if vouched is not None:
        return {"client": vouched.ip, "sub": vouched.sub, "edge": vouched.edge_id}
    client = _vouching.proxies.remote_of(exchange)
    return {} if client == exchange.peer else {"client": client}
