"""The request log of a server, with clients behind edges and proxies."""

from __future__ import annotations

from tailrace.http import request_log
from tailrace.http.exchange import Exchange
from tailrace.http.request_log import LogFields, RequestLogMode, failure_log
from tailrace.routing.client_address import ClientResolver, TrustedProxies

__all__ = ["answered", "configure", "failure_log"]


_resolver = ClientResolver("")


def configure(mode: RequestLogMode, edge_key: str = "") -> None:
    """`edge_key` verifies the client information of edges; without it that is ignored."""
    global _resolver
    _resolver = ClientResolver(edge_key)
    request_log.configure_request_log(mode, _client)


def trust(proxies: TrustedProxies) -> None:
    """Set the proxies whose forwarding headers are used."""
    _resolver.proxies = proxies


def answered(exchange: Exchange, status: int, seconds: float) -> None:
    """Log a request that did not fail; failures are logged separately, with the reason."""
    if status < 500:
        request_log.log_request(exchange, status, seconds)


def _client(exchange: Exchange) -> LogFields:
    forwarded = _resolver.client_of(exchange)
    if forwarded is not None:
        return {"client": forwarded.ip, "sub": forwarded.sub, "edge": forwarded.edge_id}
    client = _resolver.proxies.remote_of(exchange)
    return {} if client == exchange.peer else {"client": client}
