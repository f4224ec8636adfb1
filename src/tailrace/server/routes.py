"""All routes of the server, in the order of the OpenAPI document."""

from __future__ import annotations

from typing import Final

from tailrace.hub import routes as hub
from tailrace.routing.table import Route
from tailrace.schema import routes as schema
from tailrace.search import routes as search
from tailrace.server import (
    health,
    identity_routes,
    listing_routes,
    openapi,
    otlp_routes,
    pipeline_routes,
    read_routes,
    server_details,
    stream_details,
    stream_routes,
    touch_routes,
)
from tailrace.subscriptions import routes as subscriptions
from tailrace.watch import collection_routes, external_jobs
from tailrace.watch import routes as documents
from tailrace.watch.realtime import routes as realtime
from tailrace.watch.rxdb import http_routes as replication
from tailrace.watch.rxdb import websocket as replication_socket
from tailrace.watch.sources import routes as sources

ROUTES: Final[tuple[Route, ...]] = (
    *stream_routes.ROUTES,
    *read_routes.ROUTES,
    *listing_routes.ROUTES,
    *schema.ROUTES,
    *search.ROUTES,
    *stream_details.ROUTES,
    *touch_routes.ROUTES,
    *otlp_routes.ROUTES,
    *subscriptions.ROUTES,
    *health.ROUTES,
    *server_details.ROUTES,
    *openapi.ROUTES,
    *identity_routes.ROUTES,
    *realtime.ROUTES,
    *external_jobs.ROUTES,
    *sources.ROUTES,
    *collection_routes.ROUTES,
    *documents.ROUTES,
    *replication_socket.ROUTES,
    *replication.ROUTES,
    *hub.ROUTES,
    *pipeline_routes.ROUTES,
)
