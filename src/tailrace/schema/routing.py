"""Routing keys: where in a record the key is."""

from __future__ import annotations

from msgspec import Struct

from tailrace.common.errors import TailraceError
from tailrace.schema.body import expect_bool, expect_object, expect_string, invalid_request
from tailrace.schema.pointer import ABSENT, parse_pointer, resolve_pointer


class RoutingKey(Struct, frozen=True, rename="camel"):
    json_pointer: str
    required: bool

    def to_json(self) -> dict[str, object]:
        return {"jsonPointer": self.json_pointer, "required": self.required}


class RoutingKeyReader:
    """A routing key's configuration, ready to be applied to records."""

    __slots__ = ("_bytes_max", "_required", "_tokens")

    def __init__(self, key: RoutingKey, bytes_max: int) -> None:
        tokens = parse_pointer(key.json_pointer)
        assert tokens is not None, "checked when it was installed"
        self._tokens = tokens
        self._required = key.required
        self._bytes_max = bytes_max

    def key_of(self, record: object) -> bytes | None:
        """The record's key; None if it has none and need not have one."""
        found = resolve_pointer(record, self._tokens)
        if found is ABSENT or found is None or found == "":
            if self._required:
                raise invalid_request("routing key missing")
            return None
        if not isinstance(found, str):
            raise invalid_request("routing key must be string")
        try:
            key = found.encode()
        except UnicodeEncodeError:
            raise invalid_request("routing key must be valid Unicode") from None
        if len(key) > self._bytes_max:
            raise invalid_request(f"routing key must have at most {self._bytes_max} bytes")
        return key


def parse_routing_key(body: object) -> RoutingKey:
    given = expect_object(body, "routingKey", ("jsonPointer", "required"))
    pointer = expect_string(given.get("jsonPointer"), "routingKey.jsonPointer")
    if parse_pointer(pointer) is None:
        raise invalid_request("routingKey.jsonPointer must be a JSON pointer")
    return RoutingKey(pointer, expect_bool(given.get("required"), "routingKey.required"))


def key_not_allowed() -> TailraceError:
    return TailraceError("key_not_allowed", "Stream-Key not allowed when routingKey is configured")
