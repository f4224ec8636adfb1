"""Section 4: headers on every answer, preflights, the shape of errors, methods, encodings, HTTP itself."""

from __future__ import annotations

import pytest

from conftest import StartServer
from support.edge import StartEdge
from support.server import ServerProcess
from support.wire import Answer, Wire, fresh, request_bytes
from tailrace.common.errors import ERROR_STATUS
from tailrace.common.limits import Limits
from tailrace.protocol.http_headers import RESPONSE_HEADERS

JSON, TEXT = "application/json", "text/plain"
EXPOSED = """
    Stream-Next-Offset, Stream-End-Offset, Stream-Earliest-Offset, Stream-Cursor, Stream-Start,
    Stream-Up-To-Date,
    Stream-Closed, Stream-TTL, Stream-Expires-At, Stream-Retention, Stream-Retention-Bytes,
    Stream-Expected-Seq, Stream-Received-Seq, Stream-SSE-Data-Encoding,
    Stream-Filter-Scan-Limit-Reached, Stream-Filter-Scan-Limit-Bytes, Stream-Filter-Scanned-Bytes,
    Producer-Epoch, Producer-Seq, Producer-Expected-Seq, Producer-Received-Seq, Preference-Applied,
    ETag, Location, Link, Allow, Retry-After, Server-Timing, X-Cache, WWW-Authenticate, Content-Type,
    Content-Encoding, Vary
"""
ALLOWED = """
    Content-Type, Authorization, If-Match, If-None-Match, Idempotency-Key, Prefer, Cache-Control,
    Last-Event-ID, Stream-Seq, Stream-Key, Stream-Timestamp, Stream-TTL, Stream-Expires-At,
    Stream-Retention, Stream-Retention-Bytes, Stream-Closed, Stream-Forked-From, Stream-Fork-Offset,
    Stream-Fork-Sub-Offset, Producer-Id, Producer-Epoch, Producer-Seq
"""


def words(text: str) -> set[str]:
    return {word.strip().lower() for word in text.split(",")}


# -- 4.1 headers on every response


def test_every_kind_of_answer_carries_the_common_headers(http: Wire) -> None:
    name = fresh()
    http.put(name, TEXT, "x")
    tag = http.get(name)["etag"]
    answers = [
        http.put(name, TEXT),
        http.post(name, TEXT, "x"),
        http.get(name, {"If-None-Match": tag}),
        http.get(f"{name}?offset=now&live=long-poll&timeout_ms=0"),
        http.head(name),
        http.get("/nowhere"),
        http.call("OPTIONS", name),
        http.get("/healthz"),
        http.get("/v1/streams"),
        http.delete(name),
    ]
    with http.events(f"{fresh()}?offset=-1&live=sse") as refused:
        answers.append(refused.head)
    http.put(name, TEXT)
    with http.events(f"{name}?offset=-1&live=sse") as events:
        answers.append(events.head)
    for answer in answers:
        assert answer["x-content-type-options"] == "nosniff"
        assert answer["cross-origin-resource-policy"] == "cross-origin"
        assert answer["access-control-allow-origin"] == "*"
        assert words(answer["access-control-expose-headers"]) >= words(EXPOSED)
        assert not answer.headers.count(("server", "uvicorn"))


def test_answers_use_no_stream_header_that_browsers_may_not_read(http: Wire) -> None:
    name = fresh()
    exposed = {header.lower() for header in RESPONSE_HEADERS}
    answers = [
        http.put(name, JSON, "[1]", stream_ttl="100", stream_retention="1d", stream_retention_bytes="5"),
        http.post(name, JSON, "[2]", producer_id="p", producer_epoch="0", producer_seq="0"),
        http.post(name, JSON, "[2]", producer_id="p", producer_epoch="0", producer_seq="7"),
        http.post(name, JSON, "[2]", stream_seq="b", prefer="return=representation"),
        http.post(name, JSON, "[2]", stream_seq="a"),
        http.get(name),
        http.head(name),
        http.get(f"{name}?offset=-1&live=long-poll"),
        http.call("PATCH", name),
    ]
    for answer in answers:
        own = {header for header, _ in answer.headers if header.startswith(("stream-", "producer-"))}
        assert own <= exposed


# -- 4.2 preflight


@pytest.mark.parametrize(
    "path",
    ["/v1/stream/never-made", "/v1/streams", "/", "/nowhere", "/v1/stream/__ds/x", "/v1/stream/%FF", "*"],
)
def test_options_answers_everywhere(http: Wire, path: str) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "PUT"}
    with http.connect() as connection:
        connection.send(request_bytes("OPTIONS", path, asked))
        answer = connection.read_answer()
    assert answer.status == 204
    assert answer["access-control-allow-methods"] == "GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS"
    assert answer["access-control-max-age"] == "86400"
    assert words(answer["access-control-allow-headers"]) >= words(ALLOWED)
    assert answer["access-control-allow-origin"] == "*"


def test_configured_origins_and_policy(start_server: StartServer) -> None:
    server = start_server(
        "--cors-origins", "https://a.example, https://b.example", "--resource-policy", "same-site"
    )
    wire = Wire(server.port)
    for path in ("/healthz", "/nowhere"):
        for origin, allowed in [
            ("https://b.example", "https://b.example"),
            ("https://c.example", None),
            (None, None),
        ]:
            answer = wire.get(path, {} if origin is None else {"Origin": origin})
            assert answer.get("access-control-allow-origin") == allowed
            assert answer["vary"] == "Origin"
            assert answer["cross-origin-resource-policy"] == "same-site"
    wire.close()


WEBSOCKETS = (
    "/v1/stream/live?offset=-1&live=ws",
    "/hub/ws",
    "/realtime/ws",
    "/replication/ws?database=default",
)


def upgrade_status(wire: Wire, path: str, origin: str | None) -> int:
    asked = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        **({} if origin is None else {"Origin": origin}),
    }
    with wire.connect() as connection:
        connection.send(request_bytes("GET", path, asked))
        return connection.read_head().status


@pytest.mark.parametrize(
    ("origins", "refused"),
    [
        ("https://a.example, https://b.example", {"https://c.example", "http://tailrace.test", "null"}),
        ("*", set[str]()),
        ("https://a.example, *", set[str]()),
    ],
)
def test_configured_origins_hold_for_websockets(
    start_server: StartServer, origins: str, refused: set[str]
) -> None:
    """Browsers ask nobody before they open one: the server itself looks whose page it is."""
    server = start_server("--cors-origins", origins)
    wire = Wire(server.port)
    assert wire.put("live", "text/plain").status == 201
    asked = ["https://b.example", "https://c.example", "null", None]
    asked += [f"http://127.0.0.1:{server.port}", "http://localhost:3000"]  # pages of this machine
    asked += ["http://tailrace.test"]  # the host that is asked for: any name can be made to lead here
    for path in WEBSOCKETS:
        found = {origin: upgrade_status(wire, path, origin) for origin in asked}
        assert found == {origin: 403 if origin in refused else 101 for origin in asked}, path
    allowed = wire.get("/healthz", {"Origin": "https://c.example"}).get("access-control-allow-origin")
    assert allowed == (None if refused else "*")
    wire.close()


def test_an_edge_looks_at_origins_by_its_own_setting(server: ServerProcess, start_edge: StartEdge) -> None:
    edge = start_edge(server.base_url, cors_origins="https://a.example")
    owner, wire = Wire(server.port), Wire(edge.port)
    owner.put("live", "text/plain")
    for path in WEBSOCKETS:
        found = [upgrade_status(wire, path, origin) for origin in ("https://a.example", "https://c.example")]
        assert found == [101, 403], path
    owner.close()
    wire.close()


# -- 4.3 errors


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/",
        "/v1/stream",
        "/v2/stream/x",
        "/v1/streams/",
        "/V1/streams",
        "/console",
        "/console/x",
        "/v1/stream/__ds/",
        "/v1/stream/__ds/nothing",
        "/favicon.ico",
        "//v1/streams",
        "/v1/stream%2Fx",
    ],
)
def test_unknown_routes(http: Wire, path: str) -> None:
    for method in ("GET", "POST", "HEAD"):
        assert http.call(method, path).status == 404


@pytest.mark.parametrize("method", ["PATCH", "TRACE", "PROPFIND", "SEARCH", "PURGE"])
def test_methods_that_a_route_does_not_take(http: Wire, method: str) -> None:
    name = fresh()
    http.put(name, TEXT)
    for path, allow in [
        (f"/v1/stream/{name}", "GET, POST, PUT, DELETE, HEAD, OPTIONS"),
        (f"/v1/stream/{fresh()}", "GET, POST, PUT, DELETE, HEAD, OPTIONS"),
        ("/v1/streams", "GET, HEAD, OPTIONS"),
        ("/healthz", "GET, HEAD, OPTIONS"),
        ("/metrics", "GET, HEAD, OPTIONS"),
    ]:
        answer = http.call(method, path)
        assert (answer.status, answer.code) == (405, "method_not_allowed")
        assert words(answer["allow"]) == words(allow)


@pytest.mark.parametrize("path", ["/v1/streams", "/healthz", "/readyz", "/metrics"])
def test_server_routes_take_no_writes(http: Wire, path: str) -> None:
    for method in ("PUT", "POST", "DELETE"):
        assert http.call(method, path, body=b"x").code == "method_not_allowed"


def test_errors_of_head_have_the_headers_and_no_body(http: Wire) -> None:
    with http.connect() as connection:
        connection.send(request_bytes("HEAD", "/v1/stream/never") + request_bytes("GET", "/healthz"))
        refused = connection.read_answer("HEAD")
        assert refused.status == 404
        assert refused["content-type"] == "application/json; charset=utf-8"
        assert connection.read_answer().json == {"status": "ok"}


def test_unknown_parameters_and_headers_are_ignored(http: Wire) -> None:
    name = fresh()
    assert (
        http.call("PUT", f"{name}?a=1&a=2&live=nonsense", {"X-Any": "1", "Content-Type": TEXT}, b"x").status
        == 201
    )
    assert http.get(f"{name}?x=1&x=2&%C3%BC=1").body == b"x"


@pytest.mark.parametrize(
    "parameter", ["offset", "live", "cursor", "key", "since", "filter", "format", "timeout"]
)
def test_a_repeated_parameter_is_refused(http: Wire, parameter: str) -> None:
    name = fresh()
    http.put(name, JSON)
    for query in (
        f"{parameter}=a&{parameter}=b",
        f"{parameter}=&{parameter}=",
        f"{parameter}=1&x=2&%{ord(parameter[0]):x}{parameter[1:]}=1",
    ):
        answer = http.get(f"{name}?{query}")
        assert answer.status == 400
        assert answer.code in ("invalid_request", "invalid_offset")


@pytest.mark.parametrize("query", ["%FF", "offset=%FF", "x=%C3", "%ED%A0%80=1", "key=%FF"])
def test_a_query_is_utf8(http: Wire, query: str) -> None:
    name = fresh()
    http.put(name, TEXT)
    assert http.get(f"{name}?{query}").code == "invalid_request"
    assert http.get(f"/v1/streams?{query}").code == "invalid_request"


@pytest.mark.parametrize(
    "header",
    [
        "Content-Type",
        "Stream-Seq",
        "Stream-Key",
        "Stream-Timestamp",
        "Stream-Closed",
        "Producer-Id",
        "Producer-Epoch",
        "Producer-Seq",
    ],
)
def test_a_repeated_header_of_an_append_is_refused(http: Wire, header: str) -> None:
    name = fresh()
    http.put(name, TEXT)
    base = {
        "Content-Type": TEXT,
        "Producer-Id": "p",
        "Producer-Epoch": "0",
        "Producer-Seq": "0",
        "Stream-Timestamp": "1",
        "Stream-Closed": "true",
    }
    value = base.get(header, "x")
    answer = http.call(
        "POST",
        name,
        [*base.items(), *([] if header in base else [(header, value)]), (header.lower(), value)],
        b"x",
    )
    assert (answer.status, answer.code) == (400, "invalid_header")
    assert answer.json["error"]["header"].lower() == header.lower()
    assert http.get(name).body == b""


@pytest.mark.parametrize(
    "header",
    [
        "Stream-TTL",
        "Stream-Expires-At",
        "Stream-Retention",
        "Stream-Retention-Bytes",
        "Stream-Closed",
        "Content-Type",
        "Stream-Forked-From",
    ],
)
def test_a_repeated_header_of_a_creation_is_refused(http: Wire, header: str) -> None:
    name = fresh()
    assert http.call("PUT", name, [(header, "1"), (header, "1")]).code == "invalid_header"
    assert http.head(name).status == 404


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "zstd", "GZIP", "gzip, identity", "x"])
def test_compressed_bodies_are_refused(http: Wire, encoding: str) -> None:
    name = fresh()
    refused = http.call("PUT", name, {"Content-Type": TEXT, "Content-Encoding": encoding}, b"x")
    assert (refused.status, refused.code) == (415, "unsupported_encoding")
    http.put(name, TEXT)
    for method in ("POST", "PUT"):
        assert http.call(method, name, {"Content-Type": TEXT, "Content-Encoding": encoding}, b"x").status in (
            415,
        )
    assert http.get(name).body == b""
    assert http.call("POST", name, {"Content-Type": TEXT, "Content-Encoding": "identity"}, b"x").status == 204


def test_a_body_over_the_limit_is_refused_as_soon_as_it_is_known(http: Wire) -> None:
    name = fresh()
    http.put(name, TEXT)
    limit = Limits().append_body_bytes
    whole = http.call("POST", name, {"Content-Type": TEXT}, b"x" * limit)
    assert whole.status == 204
    heads = {
        "length": f"Content-Length: {limit + 1}\r\n\r\n",
        "expect": f"Content-Length: {limit + 1}\r\nExpect: 100-continue\r\n\r\n",
    }
    for head in heads.values():
        with http.connect() as connection:
            connection.send(
                f"POST /v1/stream/{name} HTTP/1.1\r\nHost: a\r\nContent-Type: {TEXT}\r\n{head}".encode()
            )
            refused = connection.read_answer()
            assert (refused.status, refused.code) == (413, "payload_too_large")
            assert refused.json["error"]["limit_bytes"] == limit
            assert connection.at_end()
    with http.connect() as connection:
        connection.send(b"PUT /v1/stream/big HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"%x\r\n" % (1024 * 1024) + b"x" * 1024 * 1024 + b"\r\n"
        for _ in range(limit // (1024 * 1024)):
            connection.send(chunk)
        connection.send(b"1\r\nx\r\n")
        assert connection.read_answer().code == "payload_too_large"
    assert http.head("big").status == 404


# -- 4.5 HTTP details


def test_chunked_bodies_and_expect(http: Wire) -> None:
    name = fresh()
    http.put(name, TEXT)
    head = f"POST /v1/stream/{name} HTTP/1.1\r\nHost: a\r\nContent-Type: {TEXT}\r\n".encode()
    with http.connect() as connection:
        connection.send(
            head + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nTrailer: t\r\n\r\n"
        )
        assert connection.read_answer().status == 204
        connection.send(head + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert connection.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue"
        connection.send(b"fg")
        assert connection.read_answer().status == 204
    assert http.get(name).body == b"abcdefg"


def test_pipelined_requests_are_answered_in_order(http: Wire) -> None:
    name = fresh()
    calls = [request_bytes("PUT", f"/v1/stream/{name}", {"Content-Type": TEXT})]
    calls += [
        request_bytes("POST", f"/v1/stream/{name}", {"content-type": TEXT}, b"%d" % n) for n in range(9)
    ]
    calls += [request_bytes("GET", f"/v1/stream/{name}"), request_bytes("DELETE", f"/v1/stream/{name}")]
    calls += [request_bytes("GET", f"/v1/stream/{name}", {"Connection": "close"})]
    with http.connect() as connection:
        connection.send(b"".join(calls))
        answers = [connection.read_answer() for _ in calls]
        assert connection.at_end()
    assert [answer.status for answer in answers] == [201, *[204] * 9, 200, 204, 404]
    assert answers[10].body == b"012345678"


def refusals(http: Wire, data: bytes) -> list[Answer]:
    """All answers to some bytes, until the server closes."""
    answers: list[Answer] = []
    with http.connect() as connection:
        connection.send(data)
        while not connection.at_end():
            answers.append(connection.read_answer())
    return answers


HIDDEN = b"DELETE /v1/stream/smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /v1/stream/smuggled HTTP/1.1\r\nHost: a\r\nContent-Type: text/plain\r\n"
SMUGGLING = {
    "length and chunks": POST + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunks and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\n" + HIDDEN,
    "conflicting lengths": POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab" + HIDDEN,
    "list of lengths": POST + b"Content-Length: 1, 1\r\n\r\na" + HIDDEN,
    "repeated length": POST + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\na" + HIDDEN,
    "obscured chunks": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunks twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunks then identity": POST
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n"
    + HIDDEN,
    "space before colon": POST + b"Content-Length : 1\r\n\r\na" + HIDDEN,
    "bare line feeds": POST.replace(b"\r\n", b"\n") + b"Content-Length: 1\n\na" + HIDDEN,
    "folded header": POST + b"X: a\r\n Content-Length: 50\r\n\r\n" + HIDDEN,
    "signed length": POST + b"Content-Length: +1\r\n\r\na" + HIDDEN,
    "hex length": POST + b"Content-Length: 0x1\r\n\r\na" + HIDDEN,
    "bad chunk size": POST + b"Transfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n" + HIDDEN,
    "no line end after chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n" + HIDDEN,
    "NUL in a header": POST + b"X: a\x00b\r\nContent-Length: 1\r\n\r\na" + HIDDEN,
    "two hosts": POST + b"Host: b\r\nContent-Length: 1\r\n\r\na" + HIDDEN,
    "no host": b"POST /v1/stream/smuggled HTTP/1.1\r\nContent-Length: 1\r\n\r\na" + HIDDEN,
}


@pytest.mark.parametrize("kind", SMUGGLING)
def test_nothing_can_be_hidden_in_a_request(http: Wire, kind: str) -> None:
    http.put("smuggled", TEXT)
    answers = refusals(http, SMUGGLING[kind])
    assert [answer.status for answer in answers] == [400]
    assert answers[0].code in ("invalid_request", "invalid_header")
    assert answers[0]["connection"] == "close"
    assert http.get("smuggled").body == b""


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /v1/streams HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 400),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GARBAGE\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"GET /v1/streams HTTP/2.0\r\nHost: a\r\n\r\n", 400),
        (b"BREW /v1/streams HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /a\x00b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
    ],
)
def test_what_is_no_request_is_refused_clearly(http: Wire, data: bytes, status: int) -> None:
    assert [answer.status for answer in refusals(http, data)] == [status]


def test_an_absolute_target_is_understood(http: Wire) -> None:
    with http.connect() as connection:
        connection.send(
            request_bytes("PUT", b"http://other.example:81/v1/stream/absolute", {"Content-Type": TEXT})
        )
        created = connection.read_answer()
    assert created["location"] == "http://other.example:81/v1/stream/absolute"


def test_http_1_0_is_served_and_closed(http: Wire) -> None:
    with http.connect() as connection:
        connection.send(b"GET /healthz HTTP/1.0\r\n\r\n")
        answer = connection.read_answer()
        assert answer.json == {"status": "ok"}
        assert connection.at_end()


def test_health_and_readiness(http: Wire) -> None:
    for path in ("/healthz", "/health"):
        answer = http.get(path)
        assert (answer.status, answer.json) == (200, {"status": "ok"})
    ready = http.get("/readyz")
    assert ready.status == 200
    assert {"status": "ready", "object_store": "ok"}.items() <= ready.json.items()
    assert set(ready.json) == {"status", "deployment", "object_store"}
    metrics = http.get("/metrics")
    assert metrics["content-type"].startswith("text/plain")
    assert b"# HELP" in metrics.body


def test_server_timing_names_the_phases(start_server: StartServer) -> None:
    wire = Wire(start_server("--server-timing").port)
    name = fresh()
    assert "total;dur=" in wire.put(name, TEXT)["server-timing"]
    assert "commit;dur=" in wire.post(name, TEXT, "x")["server-timing"]
    assert "wait;dur=" in wire.get(f"{name}?offset=now&live=long-poll&timeout_ms=20")["server-timing"]
    assert "total;dur=" in wire.get("/nowhere")["server-timing"]
    wire.close()


def test_location_uses_the_public_url_and_ignores_forwarded_headers(start_server: StartServer) -> None:
    wire = Wire(start_server("--public-url", "https://streams.example/").port)
    forwarded = {"X-Forwarded-Host": "evil.example", "X-Forwarded-Proto": "gopher"}
    assert wire.call("PUT", "a%20b", forwarded)["location"] == "https://streams.example/v1/stream/a%20b"
    wire.close()


def test_forwarded_headers_of_strangers_are_ignored(http: Wire) -> None:
    name = fresh()
    created = http.call(
        "PUT",
        name,
        {"X-Forwarded-Host": "evil.example", "X-Forwarded-Proto": "https", "Forwarded": "host=evil"},
    )
    assert created["location"] == f"http://tailrace.test/v1/stream/{name}"


def test_the_table_of_codes_is_the_specs() -> None:
    for status, codes in {
        400: "invalid_request invalid_header invalid_name reserved_name invalid_offset "
        "offset_beyond_tail invalid_timeout missing_offset missing_content_type empty_body "
        "empty_array invalid_json conflicting_expiry invalid_fork unsupported_format "
        "invalid_filter key_not_allowed",
        401: "unauthorized TOKEN_INVALID TOKEN_EXPIRED",
        403: "forbidden stale_epoch",
        404: "not_found SUBSCRIPTION_NOT_FOUND",
        405: "method_not_allowed read_only_stream",
        408: "request_timeout append_timeout",
        409: "stream_exists name_retained source_deleted content_type_mismatch stream_closed "
        "seq_conflict producer_gap",
        410: "stream_gone offset_gone",
        413: "payload_too_large",
        415: "unsupported_media_type unsupported_encoding",
        426: "upgrade_required",
        429: "overloaded",
        500: "internal",
        503: "unavailable",
        507: "insufficient_storage",
    }.items():
        assert {code: ERROR_STATUS.get(code) for code in codes.split()} == dict.fromkeys(
            codes.split(), status
        )
