"""The `search` object of a registry: fields, aliases, default fields and rollups."""

from __future__ import annotations

import math
from typing import Final

import msgspec
from msgspec import Struct

from tailrace.schema.body import expect_array, expect_object, expect_string, invalid_request, shorten
from tailrace.schema.search_fields import Binding, Field, Kind, check_name, parse_field
from tailrace.schema.search_rollups import Measure, Rollup, parse_interval_ms, parse_rollup

__all__ = [
    "Binding",
    "DefaultField",
    "Field",
    "Kind",
    "Measure",
    "Rollup",
    "SearchConfig",
    "parse_interval_ms",
    "parse_search_config",
]

FIELDS_MAX: Final = 500
ALIASES_MAX: Final = 500
ROLLUPS_MAX: Final = 64
PROFILE_CHARACTERS_MAX: Final = 64

_SEARCH_KEYS: Final = frozenset(
    {
        "profile",
        "primaryTimestampField",
        "defaultFields",
        "containsDefaultFields",
        "aliases",
        "fields",
        "rollups",
    }
)


class DefaultField(Struct, frozen=True, omit_defaults=True):
    """A field that bare words are looked for in, and how much a match in it counts."""

    field: str
    boost: int | float = 1


class SearchConfig(Struct, frozen=True, omit_defaults=True, rename="camel"):
    """What may be asked of a stream's records. Field names are the keys of `fields`."""

    fields: dict[str, Field]
    profile: str | None = None
    primary_timestamp_field: str | None = None
    default_fields: tuple[DefaultField, ...] = ()
    contains_default_fields: tuple[DefaultField, ...] = ()
    aliases: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    rollups: dict[str, Rollup] = msgspec.field(default_factory=dict[str, Rollup])

    def resolve(self, name: str) -> str | None:
        """The declared field that a name or an alias stands for."""
        name = self.aliases.get(name, name)
        return name if name in self.fields else None

    def to_json(self) -> dict[str, object]:
        """As it is shown in a registry: what is at its default is left out."""
        return msgspec.json.decode(msgspec.json.encode(self))


def parse_search_config(body: object) -> SearchConfig:
    """A `search` object from a request, checked but for the queries in rollup includes."""
    given = expect_object(body, "search", _SEARCH_KEYS)
    fields = _fields(given.get("fields"))
    primary = _name(given, "primaryTimestampField")
    if primary is not None and (primary not in fields or fields[primary].kind != "date"):
        raise invalid_request("search.primaryTimestampField must name a date field")
    profile = _name(given, "profile")
    if profile is not None and len(profile) > PROFILE_CHARACTERS_MAX:
        raise invalid_request(f"search.profile must have at most {PROFILE_CHARACTERS_MAX} characters")
    return SearchConfig(
        fields=fields,
        profile=None if profile is None else shorten(profile),
        primary_timestamp_field=primary,
        default_fields=_default_fields(given, "defaultFields", fields),
        contains_default_fields=_default_fields(given, "containsDefaultFields", fields),
        aliases=_aliases(given.get("aliases", {}), fields),
        rollups=_rollups(given.get("rollups", {}), fields, primary),
    )


def _name(given: dict[str, object], key: str) -> str | None:
    return expect_string(given[key], f"search.{key}") if key in given else None


def _fields(value: object) -> dict[str, Field]:
    given = expect_object(value, "search.fields")
    if not given:
        raise invalid_request("search.fields must not be empty")
    if len(given) > FIELDS_MAX:
        raise invalid_request(f"search.fields must have at most {FIELDS_MAX} fields")
    return {
        check_name(name, "search.fields"): parse_field(item, f"search.fields.{shorten(name)}")
        for name, item in given.items()
    }


def _aliases(value: object, fields: dict[str, Field]) -> dict[str, str]:
    given = expect_object(value, "search.aliases")
    if len(given) > ALIASES_MAX:
        raise invalid_request(f"search.aliases must have at most {ALIASES_MAX} aliases")
    aliases: dict[str, str] = {}
    for name, target in given.items():
        check_name(name, "search.aliases")
        if name in fields:
            raise invalid_request(f"search.aliases.{name} is a declared field")
        if not isinstance(target, str) or target not in fields:
            raise invalid_request(f"search.aliases.{name} must name a declared field")
        aliases[name] = target
    return aliases


def _default_fields(given: dict[str, object], key: str, fields: dict[str, Field]) -> tuple[DefaultField, ...]:
    path = f"search.{key}"
    found: dict[str, DefaultField] = {}
    for index, item in enumerate(expect_array(given.get(key, []), path, FIELDS_MAX)):
        at = f"{path}[{index}]"
        entry: dict[str, object] = (
            {"field": item} if isinstance(item, str) else expect_object(item, at, ("field", "boost"))
        )
        name = expect_string(entry.get("field"), f"{at}.field")
        if name not in fields:
            raise invalid_request(f"{at}.field must name a declared field")
        if fields[name].kind not in ("text", "keyword"):
            raise invalid_request(f"{at}.field must name a text or keyword field")
        if name in found:
            raise invalid_request(f"{at}.field is named twice")
        found[name] = DefaultField(name, _boost(entry.get("boost", 1), f"{at}.boost"))
    return tuple(found.values())


def _boost(value: object, path: str) -> int | float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        # An integer beyond the doubles has no finite weight.
        if 0 < value <= 1e308 and math.isfinite(value):
            return value if value <= 2**53 else float(value)
    raise invalid_request(f"{path} must be a finite number greater than 0")


def _rollups(value: object, fields: dict[str, Field], primary: str | None) -> dict[str, Rollup]:
    given = expect_object(value, "search.rollups")
    if len(given) > ROLLUPS_MAX:
        raise invalid_request(f"search.rollups must have at most {ROLLUPS_MAX} rollups")
    return {
        check_name(name, "search.rollups"): parse_rollup(
            item, f"search.rollups.{shorten(name)}", fields, primary
        )
        for name, item in given.items()
    }
