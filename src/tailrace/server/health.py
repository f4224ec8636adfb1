"""Health, readiness and metrics routes, and the separate listener where metrics need no token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import orjson

from tailrace.auth import Action, authorise
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.routing.openapi import STRING, Component, answer, headers, obj
from tailrace.routing.table import Auth, Identify, Route, route_group


class HealthRoutes:
    """Health and readiness need no token; metrics do."""

    def __init__(
        self,
        context: Context,
        object_store: Callable[[], str],
        more: Callable[[], Mapping[str, object]] | None = None,
    ) -> None:
        """`object_store` returns "ok" or an error, `more` further fields of the health response."""
        self._context = context
        self.stopping = False
        self._object_store = object_store
        self._more = more

    def health(self, exchange: Exchange, _: object = None) -> None:
        more: Mapping[str, object] = {} if self._more is None else self._more()
        self._json(exchange, 200, {"status": "ok", **more})

    def ready(self, exchange: Exchange, identify: Identify) -> None:
        self.respond_ready(exchange, in_detail=self._may_inspect(exchange, identify))

    def metrics(self, exchange: Exchange, _: object = None) -> None:
        head = b"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n" + responses.NO_STORE
        exchange.respond(200, head, self._context.telemetry.render())

    @property
    def unready_reason(self) -> str | None:
        if self.stopping:
            return "the server is stopping"
        log = self._context.log
        refusal = log.refusal or log.shortage
        return None if refusal is None else refusal.message

    def respond_ready(self, exchange: Exchange, *, in_detail: bool) -> None:
        reason = self.unready_reason
        # The error of the store names the bucket and the access key: not for anonymous clients.
        state = self._object_store()
        details = {"object_store": state if in_detail else state.partition(":")[0]}
        if reason is None:
            # Without its object store a server is ready until its backlog is too large.
            ready = {"status": "ready", "deployment": self._context.deployment, **details}
            self._json(exchange, 200, ready)
            return
        status = "stopping" if self.stopping else "degraded"
        self._json(exchange, 503, {"status": status, "reason": reason, **details}, b"Retry-After: 5\r\n")

    def _json(self, exchange: Exchange, status: int, body: Mapping[str, object], head: bytes = b"") -> None:
        exchange.respond(status, responses.JSON_TYPE + responses.NO_STORE + head, orjson.dumps(body))

    def _may_inspect(self, exchange: Exchange, identify: Identify) -> bool:
        """Whether the response may have details; no error without a valid token."""
        if self._context.settings.auth_configured and b"authorization" not in exchange.headers:
            return False
        try:
            authorise(identify(exchange), Action.INSPECT_SERVER)
        except TailraceError:
            return False
        return True


class MetricsApp:
    """Serves health, readiness and metrics on a port of their own, without authentication."""

    fixed_headers: bytes | None = b"X-Content-Type-Options: nosniff\r\n"

    def __init__(self, health: HealthRoutes) -> None:
        self._handlers: dict[bytes, Callable[[Exchange], None]] = {
            b"/healthz": health.health,
            b"/health": health.health,
            b"/readyz": partial(health.respond_ready, in_detail=False),
            b"/metrics": health.metrics,
        }

    def handler_for(self, exchange: Exchange) -> Callable[[Exchange], None]:
        return self.handle

    def handle(self, exchange: Exchange) -> None:
        respond = self._handlers.get(exchange.path)
        if respond is None:
            raise TailraceError("not_found", "this port serves /metrics, /healthz and /readyz")
        if exchange.method not in (b"GET", b"HEAD"):
            raise TailraceError(
                "method_not_allowed", "the method must be GET or HEAD", headers=(("Allow", "GET, HEAD"),)
            )
        respond(exchange)

    def refuse(self, exchange: Exchange | None, error: TailraceError) -> tuple[int, bytes, bytes]:
        return responses.error_response(error)

    def common_headers(self, exchange: Exchange | None) -> bytes:
        return self.fixed_headers or b""


_HEALTH: Final = Component("Health", obj({"status": {"const": "ok"}}))
_READINESS: Final = Component(
    "Readiness",
    obj(
        {"status": {"enum": ["ready", "degraded", "stopping"]}},
        {"deployment": STRING, "reason": STRING, "object_store": STRING},
    ),
)


def _health_route(path: str, operation: str) -> Route:
    return Route(
        *("GET", path, Action.PUBLIC, HealthRoutes.health, operation),
        "Whether the process is running",
        {200: answer("It is running.", _HEALTH)},
        auth=Auth.BY_HANDLER,
    )


ROUTES: Final = (
    *route_group(
        "server",
        _health_route("/healthz", "readHealth"),
        _health_route("/health", "readHealthAlias"),
    ),
    *route_group(
        "server",
        Route(
            *("GET", "/readyz", Action.PUBLIC, HealthRoutes.ready, "readReadiness"),
            "Whether appends and reads are served",
            {
                200: answer(
                    "Ready.",
                    _READINESS,
                    example={"status": "ready", "deployment": "d1", "object_store": "ok"},
                ),
                503: answer("Not ready; `reason` says why.", _READINESS, headers("Retry-After")),
            },
            auth=Auth.BY_HANDLER,
        ),
        Route(
            *("GET", "/metrics", Action.INSPECT_SERVER, HealthRoutes.metrics, "readMetrics"),
            "Metrics",
            {200: {"description": "Prometheus text.", "content": {"text/plain": {"schema": STRING}}}},
        ),
        place="all",
    ),
)
