"""Updates of a registry: the request is checked without reading data, then decided in one step."""

from __future__ import annotations

from typing import Final, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType

from tailrace.common.errors import TailraceError
from tailrace.schema.json_schema import SchemaDocument, check_schema
from tailrace.schema.json_values import expect_object, invalid_request, shorten
from tailrace.schema.lens_proof import prove_lens, resolve_lens_defaults
from tailrace.schema.lenses import Lens, deep_copy, parse_lens
from tailrace.schema.registry import API_VERSION, Registry, RoutingKey, VersionBoundary, parse_routing_key
from tailrace.schema.search_config import SearchConfig, parse_search_config

VERSIONS_MAX: Final = 1000
REGISTRY_BYTES_MAX: Final = 16 * 1024 * 1024

_KEYS: Final = frozenset({"apiVersion", "schema", "lens", "routingKey", "search"})


class RegistryUpdate(Struct, frozen=True, kw_only=True):
    """A valid update of a registry. Unset members remain unchanged; None clears."""

    schema: object = UNSET
    lens: Lens | None = None
    routing_key: RoutingKey | UnsetType | None = UNSET
    search: SearchConfig | UnsetType | None = UNSET


def prepare_update(registry: Registry, body: object) -> RegistryUpdate:
    """Check everything that does not depend on the stream's tail, including the lens proof."""
    if not isinstance(body, dict):
        raise invalid_request("schema update must be an object")
    members = cast("dict[str, object]", body)
    for key in members:
        if key not in _KEYS:
            raise invalid_request(f"schemaUpdate.{shorten(key)} is not supported")
    if members.get("apiVersion", API_VERSION) != API_VERSION:
        raise invalid_request("invalid schema apiVersion")
    if "schema" not in members:
        return _without_schema(registry, members)
    routing_key: RoutingKey | UnsetType = UNSET
    if "routingKey" in members:
        routing_key = parse_routing_key(expect_object(members["routingKey"], "routingKey"))
    search = _search(members)
    new = check_schema(members["schema"])
    update = RegistryUpdate(schema=members["schema"], routing_key=routing_key, search=search)
    if not registry.version:
        return msgspec.structs.replace(update, lens=_first_lens(registry, members))
    if _repeats_current(registry, update, members):
        return RegistryUpdate()
    return msgspec.structs.replace(update, lens=_evolution(registry, members, new))


def _without_schema(registry: Registry, members: dict[str, object]) -> RegistryUpdate:
    if "lens" in members:
        raise invalid_request("schema update lens requires schema")
    if "routingKey" not in members and "search" not in members:
        raise invalid_request("schema update must include schema, routingKey, or search")
    routing_key: RoutingKey | UnsetType | None = UNSET
    if "routingKey" in members:
        routing_key = None if members["routingKey"] is None else parse_routing_key(members["routingKey"])
    search = _search(members)
    if search is not UNSET and not registry.version:
        raise invalid_request("search config requires an installed schema version")
    return RegistryUpdate(routing_key=routing_key, search=search)


def _search(members: dict[str, object]) -> SearchConfig | UnsetType | None:
    if "search" not in members:
        return UNSET
    return None if members["search"] is None else parse_search_config(members["search"])


def _first_lens(registry: Registry, members: dict[str, object]) -> Lens | None:
    if "lens" not in members:
        return None
    lens = parse_lens(members["lens"])
    _check_versions(registry, lens)
    return lens


def _evolution(registry: Registry, members: dict[str, object], new: SchemaDocument) -> Lens:
    """The proven lens to the next version."""
    version = registry.version
    if "lens" not in members:
        raise invalid_request("lens required")
    lens = parse_lens(deep_copy(members["lens"]))
    _check_versions(registry, lens)
    if version >= VERSIONS_MAX:
        raise invalid_request(f"a stream can have at most {VERSIONS_MAX} schema versions")
    ops = resolve_lens_defaults(lens.ops, cast("list[object]", lens.document["ops"]))
    prove_lens(ops, SchemaDocument(registry.schemas[version]), new)
    return msgspec.structs.replace(lens, ops=ops)


def _repeats_current(registry: Registry, update: RegistryUpdate, members: dict[str, object]) -> bool:
    """Whether the body repeats the update to the current version, as clients do when they start."""
    before = registry.version - 1
    if (
        not json_equal(update.schema, registry.schemas[registry.version])
        or update.routing_key not in (UNSET, registry.routing_key)
        or update.search not in (UNSET, registry.search)
    ):
        return False
    if "lens" not in members:
        return before == 0
    lens = parse_lens(deep_copy(members["lens"]))
    if (lens.version_from, lens.version_to) != (before, registry.version):
        return False
    if before:
        resolve_lens_defaults(lens.ops, cast("list[object]", lens.document["ops"]))
    return json_equal(lens.document, registry.lenses.get(before))


def json_equal(one: object, other: object) -> bool:
    """Equality of JSON values: true is not 1, and the order of keys does not matter."""
    return msgspec.json.encode(one, order="sorted") == msgspec.json.encode(other, order="sorted")


def _check_versions(registry: Registry, lens: Lens) -> None:
    if lens.schema != registry.name:
        raise invalid_request("lens schema mismatch")
    if (lens.version_from, lens.version_to) != (registry.version, registry.version + 1):
        raise TailraceError("conflict", "lens version mismatch")


def is_first_schema(registry: Registry, update: RegistryUpdate) -> bool:
    return not registry.version and update.schema is not UNSET


def decide_update(
    registry: Registry, update: RegistryUpdate, next_sequence: int, *, adopted: bool = False
) -> Registry:
    """The registry after the update, for a stream whose next entry has this sequence number.

    `adopted`: all entries were checked and are valid under the first schema, which then applies to them.
    """
    changes: dict[str, object] = {}
    if update.routing_key is not UNSET:
        changes["routing_key"] = update.routing_key
    if update.search is not UNSET:
        changes["search"] = update.search
    if update.schema is not UNSET:
        if not registry.version and next_sequence and not adopted:
            raise invalid_request(
                "first schema requires empty stream; with ?adopt=true (--adopt) the existing entries are "
                "checked, and the schema applies from the first one on"
            )
        first = 0 if not registry.version else next_sequence
        version = registry.version + 1
        changes["version"] = version
        changes["schemas"] = {**registry.schemas, version: update.schema}
        changes["boundaries"] = (*registry.boundaries, VersionBoundary(first, version))
        if update.lens is not None:
            changes["lenses"] = {**registry.lenses, version - 1: update.lens.document}
    updated = msgspec.structs.replace(registry, **changes)
    if len(updated.to_json()) > REGISTRY_BYTES_MAX:
        raise invalid_request(f"registry would be larger than {REGISTRY_BYTES_MAX} bytes")
    return updated
