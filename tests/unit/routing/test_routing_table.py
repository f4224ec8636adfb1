"""The routing table: matching, labels, authorization, and that its rows are what the server has."""

from __future__ import annotations

import pytest

from tailrace.auth import Action
from tailrace.cluster.scatter_gather import ScatterGather
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.edge import app as edge
from tailrace.edge import forwarding, held_streams, invalidation
from tailrace.protocol.stream_names import RESERVED_LAST_SEGMENTS, is_sub_resource_name
from tailrace.routing.table import METHOD_ORDER, Auth, Resource, RoutingTable
from tailrace.server.routes import ROUTES

TABLE = RoutingTable(ROUTES)
# What is not in the path: the dispatcher cannot authorise these.
AUTHORISED_BY_HANDLERS = {
    "createStream",
    "append",
    "describeStream",
    "deleteStream",
    "readStream",
    "readKey",
    "listStreams",
    "exportTracesByDefault",
    "seal",
}
IDENTIFIED_BY_HANDLERS = {"watchByEvents", "watchSeveralByEvents"}


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/v1/stream/orders", "/v1/stream/{name}"),
        ("/v1/stream/orders/eu/today", "/v1/stream/{name}"),
        ("/v1/stream/orders/_search", "/v1/stream/{name}/_search"),
        ("/v1/stream/a/b/touch/templates/activate", "/v1/stream/{name}/touch/templates/activate"),
        ("/v1/stream/a/touch/nothing", "/..."),
        ("/v1/stream/a/_otlp/v1/traces", "/v1/stream/{name}/_otlp/v1/traces"),
        ("/v1/stream/a/b/pk/k%2F1", "/v1/stream/{name}/pk/{key}"),
        ("/v1/stream/__ds/jwks.json", "/v1/stream/__ds/jwks.json"),
        (
            "/v1/stream/__ds/subscriptions/s/streams/a/b",
            "/v1/stream/__ds/subscriptions/{id}/streams/{name}",
        ),
        ("/v1/stream/__dsx", "/v1/stream/{name}"),
        ("/v1/stream/%FF", "/v1/stream/{name}"),
        ("/v1/streams", "/v1/streams"),
        ("/v1/databases/shop", "/v1/databases/{db}"),
        ("/v1/databases/shop/collections", "/v1/databases/{db}/collections"),
        ("/v1/databases/shop/collections/x/y/z", "/v1/databases/{db}/collections/{collection}"),
        ("/v1/databases/shop/sources/s/resync", "/v1/databases/{db}/sources/{source}/resync"),
        ("/v1/databases/shop/nothing", "/..."),
        ("/metrics", "/metrics"),
        ("/", "/..."),
        ("*", "/..."),
        ("/wp-login.php", "/..."),
        ("/a/b/c", "/..."),
    ],
)
def test_the_label_of_a_path_has_no_names_of_clients(path: str, label: str) -> None:
    assert TABLE.label(path.encode()) == label


def test_parameters_of_a_path() -> None:
    found = TABLE.find(b"/v1/databases/shop/docs/orders/o-1")
    assert found is not None
    assert (found[0].path, found[1]) == ("/v1/databases/{db}/docs/{path}", [b"shop", b"orders/o-1"])
    sub_resource = TABLE.find_sub_resource("a/b/touch/wait")
    assert sub_resource is not None
    assert (sub_resource[0].path, sub_resource[1]) == ("/v1/stream/{name}/touch/wait", "a/b")


def test_the_allow_header_names_the_methods_of_a_path() -> None:
    keys = TABLE.resources["/v1/server/_keys"]
    assert keys.allow == "GET, HEAD, POST, OPTIONS"
    with pytest.raises(TailraceError) as caught:
        keys.handler(b"PATCH")
    assert (caught.value.status, dict(caught.value.headers)["Allow"]) == (405, keys.allow)


def test_rows_are_unique() -> None:
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)
    assert len({route.operation for route in ROUTES}) == len(ROUTES)
    assert {route.method for route in ROUTES} <= set(METHOD_ORDER)


def test_every_route_below_a_stream_has_a_reserved_name() -> None:
    """Otherwise a stream could be created with a name that cannot be reached."""
    for route in ROUTES:
        if route.path.startswith("/v1/stream/{name}/"):
            assert is_sub_resource_name(route.path.removeprefix("/v1/stream/").replace("{name}", "a"))
    suffixes = {route.path.removeprefix("/v1/stream/{name}/").partition("/")[0] for route in ROUTES}
    assert suffixes >= RESERVED_LAST_SEGMENTS


def test_the_dispatcher_authorises_all_routes_but_these() -> None:
    public = {route.operation for route in ROUTES if route.action in (Action.PUBLIC, Action.ANSWER_WAKE)}
    by_handler = {route.operation for route in ROUTES if route.auth is Auth.BY_HANDLER}
    assert by_handler == public | IDENTIFIED_BY_HANDLERS
    identified = {route.operation for route in ROUTES if route.auth is Auth.IDENTIFIED}
    assert identified == AUTHORISED_BY_HANDLERS


def test_routes_of_all_workers_are_those_that_are_gathered() -> None:
    gathered = ScatterGather({}, Limits(), "").handlers
    assert {path.decode() for path in gathered} == {route.path for route in ROUTES if route.place == "all"}


@pytest.mark.parametrize("resource", TABLE.resources.values(), ids=lambda one: one.path)
def test_all_methods_of_a_path_are_served_by_the_same_worker(resource: Resource) -> None:
    assert len({route.place for route in resource.routes.values()}) == 1


def test_paths_that_an_edge_knows_are_in_the_table() -> None:
    """An edge may not import the rooms of the server."""
    known = (*edge.ADMIN_PATHS, *edge.PUBLIC_PATHS, edge.TRACES_PATH, *forwarding.LISTING_PATHS)
    for path in (*known, held_streams.REALTIME, invalidation.REVOKED_PATH):
        assert path.decode() in TABLE.resources, path
    public = {route.path for route in ROUTES if route.action is Action.PUBLIC}
    assert {path.decode() for path in (*edge.HEALTH_PATHS, *edge.PUBLIC_PATHS)} <= public
    prefixes = (*forwarding.UNSHARDED_PATHS, *forwarding.DATABASE_PREFIXES, *forwarding.WATCH_PREFIXES)
    for prefix in (*prefixes, held_streams.REPLICATION):
        assert any(route.path.startswith(prefix.decode()) for route in ROUTES), prefix
    databases = tuple(prefix.decode() for prefix in forwarding.DATABASE_PREFIXES)
    assert all(route.path.startswith(databases) for route in ROUTES if "{db}" in route.path)
