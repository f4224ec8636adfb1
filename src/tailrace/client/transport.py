"""Between our requests and httpx2: what both shells need of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import httpx2
import msgspec

from tailrace.client.arguments import check_seconds
from tailrace.client.retry import Retries
from tailrace.client.steps import BrokenConnectionError
from tailrace.client.wire import HttpRequest, HttpResponse

# Nothing has left this machine when one of these is raised.
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)

# What the network or the other side did. Errors of our own making (a malformed URL, an illegal header) are
# not among them: they would fail again.
CONNECTION_ERRORS = (
    httpx2.TimeoutException,
    httpx2.NetworkError,
    httpx2.RemoteProtocolError,
    httpx2.ProxyError,
    httpx2.DecodingError,
)

# Each follower holds a connection. Beyond this many they wait for each other.
CONNECTIONS_MAX = 1000
CONNECTIONS_IDLE_MAX = 100
# Well below the 75 s after which the server closes an idle connection: it must not close one under us.
CONNECTION_IDLE_S_MAX = 30.0


class TransportSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a client reaches its server."""

    base_url: str
    token: str | Callable[[], str] | None
    timeout_s: float
    connect_timeout_s: float
    retries: Retries

    def authorization(self) -> bytes | None:
        token = self.token() if callable(self.token) else self.token
        # One that was read from a file often ends with a line break.
        token = None if token is None else token.strip()
        if not token:
            return None
        if not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError("the token has characters that no header can carry")
        return b"Bearer " + token.encode()

    def build(self, http: httpx2.Client | httpx2.AsyncClient, request: HttpRequest) -> httpx2.Request:
        headers = [(name.encode("ascii"), value) for name, value in request.headers]
        if (authorization := self.authorization()) is not None:
            headers.append((b"Authorization", authorization))
        read_s = max(self.timeout_s, request.wait_s)
        return http.build_request(
            request.method,
            self.base_url + request.path,
            headers=headers,
            content=request.body if request.method in ("POST", "PUT") else None,
            timeout=httpx2.Timeout(self.timeout_s, connect=self.connect_timeout_s, read=read_s),
        )


def make_settings(
    base_url: str,
    *,
    token: str | Callable[[], str] | None,
    timeout_s: float,
    connect_timeout_s: float,
    retries: Retries | None,
) -> TransportSettings:
    if not base_url.startswith(("http://", "https://")):
        raise ValueError(f"base_url must start with http:// or https://: {base_url!r}")
    try:
        host = httpx2.URL(base_url).host
    except httpx2.InvalidURL as error:
        raise ValueError(f"base_url is not a URL: {base_url!r} ({error})") from None
    check_seconds("timeout_s", timeout_s)
    check_seconds("connect_timeout_s", connect_timeout_s)
    if not host:
        raise ValueError(f"base_url names no host: {base_url!r}")
    return TransportSettings(
        base_url=base_url.rstrip("/"),
        token=token,
        timeout_s=timeout_s,
        connect_timeout_s=connect_timeout_s,
        retries=retries or Retries(),
    )


def pool_limits() -> httpx2.Limits:
    return httpx2.Limits(
        max_connections=CONNECTIONS_MAX,
        max_keepalive_connections=CONNECTIONS_IDLE_MAX,
        keepalive_expiry=CONNECTION_IDLE_S_MAX,
    )


def broken_connection_from(error: httpx2.RequestError) -> BrokenConnectionError:
    reason = str(error) or type(error).__name__
    return BrokenConnectionError(reason, sent=not isinstance(error, _NOT_SENT))


def response_from(response: httpx2.Response, body: bytes) -> HttpResponse:
    headers: Mapping[str, str] = {name.lower(): value for name, value in response.headers.items()}
    return HttpResponse(response.status_code, headers, body)
