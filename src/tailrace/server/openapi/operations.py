"""What operations are put together from: parameters, headers, answers and refusals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, cast

from tailrace.common.errors import ERROR_STATUS, RETRY_AFTER_S
from tailrace.server.openapi.objects import obj
from tailrace.server.openapi.values import STRING, Json

# Any request may meet these, whatever it asks for.
ALWAYS: Final = (400, 408, 413, 500, 503)
# And these, where it matters who asks: 429 if that is too much for one identity.
GUARDED: Final = (*ALWAYS, 401, 403, 429)

_EXTRA_HEADERS: Final[dict[int, tuple[str, ...]]] = {
    401: ("WWW-Authenticate",),
    403: ("WWW-Authenticate", "Producer-Epoch"),
    405: ("Allow",),
    409: (
        *("Stream-Next-Offset", "Stream-Closed", "Producer-Expected-Seq", "Producer-Received-Seq"),
        *("Stream-Expected-Seq", "Stream-Received-Seq"),
    ),
    410: ("Stream-Earliest-Offset",),
    426: ("Upgrade",),
}


def ref(kind: str, name: str) -> Json:
    return {"$ref": f"#/components/{kind}/{name}"}


def schema(name: str) -> Json:
    return ref("schemas", name)


def param(
    place: str, name: str, about: str, shape: Json | None = None, *, required: bool = False, **more: object
) -> Json:
    found: Json = {"name": name, "in": place, "description": about, "schema": shape or STRING, **more}
    return found | {"required": True} if required or place == "path" else found


def query(
    name: str, about: str, shape: Json | None = None, *, required: bool = False, **more: object
) -> Json:
    return param("query", name, about, shape, required=required, **more)


def params(*names: str) -> list[Json]:
    """Parameters that more than one operation has."""
    return [ref("parameters", name) for name in names]


def headers(*names: str, always: Sequence[str] = ()) -> Json:
    """Headers of an answer. Those that are always there are said to be required."""
    found: Json = {name: ref("headers", name) for name in names}
    for name in always:
        found[name] = ref("headers", f"{name}-always")
    return found


def answer(about: str, body: Json | None = None, head: Json | None = None, example: object = None) -> Json:
    """An answer, with JSON in it if it has a body."""
    found: Json = {"description": about}
    if head:
        found["headers"] = head
    if body is not None:
        found["content"] = json_content(body, example)
    return found


def json_content(body: Json, example: object = None) -> Json:
    return {"application/json": {"schema": body} | ({} if example is None else {"example": example})}


def request(body: Json, example: object, about: str) -> Json:
    return {"description": about, "required": True, "content": json_content(body, example)}


def refusals(statuses: Iterable[int]) -> Json:
    return {str(status): ref("responses", f"Error{status}") for status in sorted(set(statuses))}


def operation(
    identifier: str,
    tag: str,
    about: str,
    answers: Json,
    errors: Iterable[int] = (),
    *,
    scope: str | None = None,
    parameters: Sequence[Json] = (),
    body: Json | None = None,
    more: str = "",
) -> Json:
    """One method of a path. Without a scope it is for everybody."""
    common = ALWAYS if scope is None else GUARDED
    found: Json = {
        "operationId": identifier,
        "tags": [tag],
        "summary": about,
        "responses": refusals({*common, *errors}) | answers,
    }
    if more:
        found["description"] = more
    if parameters:
        found["parameters"] = list(parameters)
    if body is not None:
        found["requestBody"] = body
    # A server without authentication asks for nothing.
    found["security"] = [] if scope is None else [{"bearer": [scope] if scope else []}, {}]
    return found


def without_body(get: Json, identifier: str) -> Json:
    """HEAD as it follows from GET: the same statuses and headers, and no body."""
    found = {**get, "operationId": identifier, "summary": f"{get['summary']}, headers only"}
    answers = cast("dict[str, Json]", get["responses"])
    bare: Json = {}
    for status, given in answers.items():
        reference = given.get("$ref")
        if reference is None:
            bare[status] = {key: value for key, value in given.items() if key != "content"}
        else:
            bare[status] = ref("responses", f"Bare{str(reference).rpartition('/')[2]}")
    return found | {"responses": bare}


def error_responses() -> Json:
    """One answer for each status an error can have, made from the table of codes."""
    by_status: dict[int, list[str]] = {}
    for code, status in ERROR_STATUS.items():
        by_status.setdefault(status, []).append(code)
    found: Json = {}
    for status, codes in sorted(by_status.items()):
        names = [
            *_EXTRA_HEADERS.get(status, ()),
            *(["Retry-After"] if set(codes) & set(RETRY_AFTER_S) else []),
        ]
        about = "Refused: " + ", ".join(f"`{code}`" for code in codes)
        fields = obj({"code": {"enum": codes}, "message": STRING})
        body: Json = {"allOf": [schema("Error"), obj({"error": fields})]}
        example = {"error": {"code": codes[0], "message": "what is wrong, for people"}}
        found[f"Error{status}"] = answer(about, body, headers(*names), example)
        found[f"BareError{status}"] = answer(about, None, headers(*names))
    return found
