"""The routing table: one row for each method and path, from which requests are dispatched.

A room's routes file ends with its rows, so they exist without a server; `RoutingTable.bind` connects the
handlers of the rows to the objects of a server. Authorization, the `Allow` header of 405, labels of traces,
the placement among workers, the OpenAPI document and the tests that walk all routes come from the rows.

Appends and reads of streams are not dispatched here: `TailraceApp.handle` has a shorter path for them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from tailrace.auth import Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.protocol.stream_names import decode_name, is_sub_resource_name
from tailrace.routing.openapi import Json
from tailrace.routing.responses import method_not_allowed

STREAM_PREFIX: Final = b"/v1/stream/"
STREAM_PATH: Final = "/v1/stream/{name}"
KEY_PATH: Final = "/v1/stream/{name}/pk/{key}"
CONTROL_PREFIX: Final = b"/v1/stream/__ds"
UNKNOWN_LABEL: Final = "/..."
# Below these the token is checked before the path and the method.
IDENTIFIED_PREFIXES: Final = (
    *(STREAM_PREFIX, b"/v1/pipeline/", b"/v1/traces", b"/v1/databases", b"/replication/v1/"),
)
# Parameters at the end of a path that may contain slashes.
GREEDY_PARAMETERS: Final = frozenset({"{name}", "{collection}", "{path}"})
METHOD_ORDER: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

Identify = Callable[[Exchange], Identity]
Handler = Callable[..., None]
# Which worker serves a route: any, the owner of the stream, the first, or all of them together.
Place = Literal["any", "owner", "first", "all"]


class Auth(enum.Enum):
    """What the dispatcher checks before it calls the handler, and what the handler gets."""

    CHECKED = enum.auto()  # token and action, for the stream or database of the path: gets the identity
    IDENTIFIED = enum.auto()  # the token; the handler authorises what the path does not name
    BY_HANDLER = enum.auto()  # nothing: no token is required, or it comes otherwise; gets `identify`


class Route(msgspec.Struct, frozen=True):
    """A row: `handler` is an unbound method, called with exchange, identity and the path's parameters."""

    method: str
    path: str
    action: Action
    handler: Handler
    operation: str
    summary: str
    responses: Mapping[int, Json]  # those of success; see `routing.openapi` for these and the rest
    errors: tuple[int, ...] = ()  # statuses beside those that every request may get
    parameters: Sequence[Json] = ()  # of the query string and headers
    body: Json | None = None
    description: str = ""
    auth: Auth = Auth.CHECKED
    tag: str = ""
    place: Place = "any"

    @property
    def methods(self) -> tuple[str, ...]:
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)

    @property
    def subject(self) -> Literal["stream", "db"] | None:
        """What the first parameter of the path is, if authorization depends on it."""
        if self.path.startswith(STREAM_PATH):
            return "stream"
        return "db" if "{db}" in self.path else None


def route_group(tag: str, *routes: Route, place: Place = "any") -> tuple[Route, ...]:
    """Rows with the same tag in the OpenAPI document, served at the same place."""
    return tuple(msgspec.structs.replace(route, tag=tag, place=place) for route in routes)


class Resource:
    """The rows of one path."""

    __slots__ = ("allow", "handlers", "identified_first", "path", "place", "routes")

    def __init__(self, path: str, routes: Sequence[Route]) -> None:
        self.path = path
        self.routes: dict[bytes, Route] = {}
        for route in routes:
            for method in route.methods:
                # A row for HEAD comes before the HEAD that GET implies.
                if method == route.method or method.encode() not in self.routes:
                    self.routes[method.encode()] = route
        self.handlers: dict[bytes, Handler] = {}
        self.place: Place = routes[0].place
        self.allow = ", ".join(
            method for method in METHOD_ORDER if method == "OPTIONS" or method.encode() in self.routes
        )
        raw = path.encode()
        self.identified_first = raw.startswith(IDENTIFIED_PREFIXES) and not raw.startswith(CONTROL_PREFIX)

    def handler(self, method: bytes) -> Handler:
        """The bound handler of a method; raises 405 without one."""
        if method not in self.routes:
            raise method_not_allowed(self.allow)
        return self.handlers[method]


class _Node:
    """A segment in the tree of paths."""

    __slots__ = ("children", "greedy", "parameter", "resource")

    def __init__(self) -> None:
        self.children: dict[bytes, _Node] = {}
        self.parameter: _Node | None = None
        self.greedy = False
        self.resource: Resource | None = None


class RoutingTable:
    """Finds the resource of a path, and serves a request with it."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        by_path: dict[str, list[Route]] = {}
        for route in self.routes:
            by_path.setdefault(route.path, []).append(route)
        self.resources = {path: Resource(path, rows) for path, rows in by_path.items()}
        self.stream = self.resources[STREAM_PATH]
        self.key = self.resources[KEY_PATH]
        self._root = _Node()
        self._sub_resources: dict[str, Resource] = {}  # by what follows the name of the stream
        for path, resource in self.resources.items():
            if not path.startswith(STREAM_PATH):
                self._add(resource)
            elif resource not in (self.stream, self.key):
                self._sub_resources[path.removeprefix(STREAM_PATH + "/")] = resource
        self._segments_max = max(suffix.count("/") + 1 for suffix in self._sub_resources)

    def _add(self, resource: Resource) -> None:
        node = self._root
        for segment in resource.path.split("/")[1:]:
            if not segment.startswith("{"):
                node = node.children.setdefault(segment.encode(), _Node())
                continue
            if node.parameter is None:
                node.parameter = _Node()
            node = node.parameter
            node.greedy = segment in GREEDY_PARAMETERS
        node.resource = resource

    def bind(self, *owners: object) -> None:
        """Connect the rows whose handlers are methods of these objects."""
        for owner in owners:
            kind = type(owner)
            for resource in self.resources.values():
                for method, route in resource.routes.items():
                    if getattr(kind, route.handler.__name__, None) is route.handler:
                        resource.handlers[method] = route.handler.__get__(owner)

    def unbound(self) -> list[str]:
        """Operations without an object; none once a server is assembled."""
        return [
            route.operation
            for resource in self.resources.values()
            for method, route in resource.routes.items()
            if method not in resource.handlers
        ]

    # -- matching --------------------------------------------------------------------------------------

    def find(self, path: bytes) -> tuple[Resource, list[bytes]] | None:
        """The resource of a path that is not below a stream, with its raw parameters."""
        node = self._root
        segments = path.split(b"/")
        parameters: list[bytes] = []
        for index in range(1, len(segments)):
            child = node.children.get(segments[index])
            if child is None:
                child = node.parameter
                if child is None:
                    return None
                if child.greedy:
                    parameters.append(b"/".join(segments[index:]))
                    node = child
                    break
                parameters.append(segments[index])
            node = child
        return None if node.resource is None else (node.resource, parameters)

    def handler_at(self, path: bytes, method: bytes) -> Handler:
        """The handler of a path without parameters; raises 404 or 405 without one."""
        found = self.find(path)
        if found is None:
            raise TailraceError("not_found", "path not found")
        return found[0].handler(method)

    def find_sub_resource(self, path: str) -> tuple[Resource, str] | None:
        """The sub-resource of a decoded path below `/v1/stream/`, with the name of the stream."""
        segments = path.split("/")
        for count in range(min(self._segments_max, len(segments) - 1), 0, -1):
            found = self._sub_resources.get("/".join(segments[-count:]))
            if found is not None:
                return found, "/".join(segments[:-count])
        return None

    def label(self, path: bytes) -> str:
        """The pattern of a path, without names chosen by clients, so that there are few different labels."""
        resource = self._resource_at(path)
        return UNKNOWN_LABEL if resource is None else resource.path

    def _resource_at(self, path: bytes) -> Resource | None:
        if not is_stream_path(path):
            found = self.find(path)
            return None if found is None else found[0]
        raw = path[len(STREAM_PREFIX) :]
        if split_key(raw) is not None:
            return self.key
        name = decode_name(raw) or ""
        if not is_sub_resource_name(name):
            return self.stream
        sub_resource = self.find_sub_resource(name)
        return None if sub_resource is None else sub_resource[0]

    # -- serving ---------------------------------------------------------------------------------------

    def serve(self, exchange: Exchange, identify: Identify) -> None:
        """Serve a request that is not for a stream or its sub-resources."""
        found = self.find(exchange.path)
        if found is None:
            if exchange.path.startswith(IDENTIFIED_PREFIXES):
                identify(exchange)
            raise TailraceError("not_found", "path not found")
        resource, raw = found
        identity = identify(exchange) if resource.identified_first else None
        parameters = [_decode(parameter, exchange.path) for parameter in raw]
        self.serve_resource(exchange, resource, parameters, identify, identity)

    def serve_resource(
        self,
        exchange: Exchange,
        resource: Resource,
        parameters: Sequence[str],
        identify: Identify,
        identity: Identity | None,
    ) -> None:
        """Check the method, the token and the rights, and call the handler."""
        handler = resource.handler(exchange.method)
        route = resource.routes[exchange.method]
        if route.auth is Auth.BY_HANDLER:
            handler(exchange, identify, *parameters)
            return
        if identity is None:
            identity = identify(exchange)
        if route.auth is Auth.CHECKED:
            subject = route.subject
            authorise(
                identity,
                route.action,
                stream=parameters[0] if subject == "stream" else None,
                db=parameters[0] if subject == "db" else None,
            )
        handler(exchange, identity, *parameters)


def is_stream_path(path: bytes) -> bool:
    """Whether the path is of a stream or below one; `__ds` has routes of its own."""
    if not path.startswith(STREAM_PREFIX):
        return False
    return not path.startswith(CONTROL_PREFIX) or path[len(CONTROL_PREFIX) :][:1] not in (b"", b"/")


def split_key(raw: bytes) -> tuple[bytes, bytes] | None:
    """Name and key of a raw path that ends with `/pk/{key}`; the key may contain an encoded slash."""
    name, slash, key = raw.rpartition(b"/pk/")
    return (name, key) if slash and b"/" not in key else None


def _decode(parameter: bytes, path: bytes) -> str:
    text = decode_name(parameter)
    if text is None:
        # The subscription protocol has error codes of its own.
        code = "INVALID_REQUEST" if path.startswith(CONTROL_PREFIX) else "invalid_path"
        raise TailraceError(code, "the path must be UTF-8")
    return text
