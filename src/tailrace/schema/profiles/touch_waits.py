"""Waiting for touches: parsed wait requests, and the waiters that a touch wakes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final, cast

from msgspec import Struct

from tailrace.common.errors import TailraceError
from tailrace.schema.json_values import (
    expect_array,
    expect_bool,
    expect_object,
    expect_string,
    invalid_request,
    shorten,
)
from tailrace.schema.profiles.touch_keys import ID_MASK, key_id, read_key
from tailrace.schema.profiles.touch_templates import TemplateDeclaration, parse_templates

KEYS_MAX: Final = 1024
EXACT_KEYS_MAX: Final = 16
ANY_LENGTH: Final = 2**31  # as long as the body is; the limit has its own words
TIMEOUT_MS_MAX: Final = 120_000
TIMEOUT_MS: Final = 30_000
KEY_CHARACTERS_MAX: Final = 1024

_CURSOR = re.compile(r"([0-9a-f]{16}):([0-9]{1,18})")
_KEYS: Final = frozenset(
    {
        *("cursor", "keys", "keyIds", "timeoutMs", "interestMode", "exact", "templateIdsUsed"),
        *("declareTemplates", "inactivityTtlMs"),
    }
)


class WaitRequest(Struct, frozen=True):
    cursor: tuple[str, int] | None  # epoch and generation; None for `now`
    keys: frozenset[int]  # literal 64-bit keys, of exact waits
    ids: frozenset[int]
    timeout_ms: int
    fine: bool
    exact: bool
    templates: tuple[int, ...]
    template_names: tuple[str, ...]  # as they were sent
    declared: tuple[TemplateDeclaration | None, ...]
    body: dict[str, object]


class Waiter:
    """One wait. It listens to keys, to coarse marks of entities, or (naming none) to all of those."""

    __slots__ = (
        *("answer", "cursor", "deadline", "entities", "fine", "ids", "keys", "kind", "refuse", "templates"),
    )

    def __init__(
        self,
        cursor: int,
        kind: str,
        keys: frozenset[int],
        ids: frozenset[int],
        fine: bool,
        entities: frozenset[str],
        templates: tuple[int, ...],
        deadline: float,
        answer: Callable[[dict[str, object]], None],
    ) -> None:
        self.cursor = cursor
        self.kind = kind
        self.keys = keys
        self.ids = ids
        self.fine = fine
        self.entities = entities
        self.templates = templates
        self.deadline = deadline
        self.answer = answer
        self.refuse: Callable[[TailraceError], None] = _ignore


def _ignore(_: TailraceError) -> None:
    """The default of `refuse`: no response is pending."""


def parse_cursor(value: object) -> tuple[str, int] | None:
    if value == "now":
        return None
    match = _CURSOR.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise invalid_request("wait.cursor must be in the form <epochHex>:<generation> or 'now'")
    return match[1], int(match[2])


def parse_wait(body: object) -> WaitRequest:
    given = expect_object(body, "wait", _KEYS)
    cursor = parse_cursor(given.get("cursor"))
    texts = _strings(given, "keys", KEY_CHARACTERS_MAX)
    ids = _ids(given)
    if not texts and not ids:
        raise invalid_request("wait requires keys or keyIds")
    timeout_ms = given.get("timeoutMs", TIMEOUT_MS)
    if (
        not isinstance(timeout_ms, int)
        or isinstance(timeout_ms, bool)
        or not 0 <= timeout_ms <= TIMEOUT_MS_MAX
    ):
        raise invalid_request(f"wait.timeoutMs must be an integer from 0 to {TIMEOUT_MS_MAX}")
    mode = given.get("interestMode", "fine")
    if mode not in ("fine", "coarse"):
        raise invalid_request("wait.interestMode must be 'fine' or 'coarse'")
    exact = expect_bool(given.get("exact", False), "wait.exact")
    keys = [read_key(text) for text in texts]
    if exact and (mode != "fine" or ids or None in keys or not 1 <= len(keys) <= EXACT_KEYS_MAX):
        raise invalid_request(f"wait.exact requires 1 to {EXACT_KEYS_MAX} literal 64-bit routing keys")
    names = _strings(given, "templateIdsUsed", 16)
    templates = [read_key(name) for name in names]
    if None in templates:
        raise invalid_request("wait.templateIdsUsed must hold template ids of 16 hex digits")
    declared = parse_templates(given.get("declareTemplates", []), "wait.declareTemplates")
    return WaitRequest(
        cursor=cursor,
        keys=frozenset(cast("list[int]", keys)) if exact else frozenset[int](),
        ids=frozenset[int]() if exact else ids | frozenset(map(key_id, texts)),
        timeout_ms=timeout_ms,
        fine=mode == "fine",
        exact=exact,
        templates=tuple(cast("list[int]", templates)),
        template_names=names,
        declared=tuple(declared),
        body=given,
    )


def _strings(given: dict[str, object], key: str, characters_max: int) -> tuple[str, ...]:
    texts: list[str] = []
    for index, item in enumerate(_items(given, key)):
        text = expect_string(item, f"wait.{key}[{index}]")
        if not text.strip() or len(text) > characters_max:
            raise invalid_request(f"wait.{key}[{index}] must have 1 to {characters_max} characters")
        texts.append(text)
    return tuple(texts)


def _items(given: dict[str, object], key: str) -> list[object]:
    items = expect_array(given.get(key, []), f"wait.{key}", ANY_LENGTH)
    if len(items) > KEYS_MAX:
        raise invalid_request(f"wait.{key} too large (max {KEYS_MAX})")
    return items


def _ids(given: dict[str, object]) -> frozenset[int]:
    ids = _items(given, "keyIds")
    for index, item in enumerate(ids):
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= ID_MASK:
            raise invalid_request(f"wait.keyIds[{index}] must be an integer from 0 to {ID_MASK}")
    return frozenset(cast("list[int]", ids))


class Waiters:
    """The waiting requests of one stream, by the keys that they wait for."""

    def __init__(self) -> None:
        self.all: dict[Waiter, None] = {}
        self._by_key: dict[int, dict[Waiter, None]] = {}
        self._by_id: dict[int, dict[Waiter, None]] = {}
        self._by_entity: dict[str | None, dict[Waiter, None]] = {}
        self._by_template: dict[int, int] = {}

    def add(self, waiter: Waiter) -> None:
        self.all[waiter] = None
        for index, place in self._places(waiter):
            index.setdefault(place, {})[waiter] = None
        for template in waiter.templates:
            self._by_template[template] = self._by_template.get(template, 0) + 1

    def remove(self, waiter: Waiter) -> bool:
        if waiter not in self.all:
            return False
        del self.all[waiter]
        for index, place in self._places(waiter):
            among = index[place]
            del among[waiter]
            if not among:
                del index[place]
        for template in waiter.templates:
            self._by_template[template] -= 1
            if not self._by_template[template]:
                del self._by_template[template]
        return True

    def uses(self, template: int) -> bool:
        return template in self._by_template

    def touched_by(self, keys: Iterable[int], entities: Iterable[str]) -> dict[Waiter, None]:
        """Whom these keys and coarse marks wake."""
        found: dict[Waiter, None] = {}
        for key in keys:
            found |= self._by_key.get(key, {})
            found |= self._by_id.get(key & ID_MASK, {})
        for entity in entities:
            found |= self._by_entity.get(entity, {})
            found |= self._by_entity.get(None, {})
        return found

    def due(self, now: float) -> list[Waiter]:
        return [waiter for waiter in self.all if waiter.deadline <= now]

    def _places(self, waiter: Waiter) -> list[tuple[dict[object, dict[Waiter, None]], object]]:
        by_key = cast("dict[object, dict[Waiter, None]]", self._by_key)
        by_id = cast("dict[object, dict[Waiter, None]]", self._by_id)
        by_entity = cast("dict[object, dict[Waiter, None]]", self._by_entity)
        places: list[tuple[dict[object, dict[Waiter, None]], object]] = []
        places += [(by_key, key) for key in waiter.keys]
        places += [(by_id, one) for one in waiter.ids]
        if waiter.fine:
            places += [(by_entity, entity) for entity in waiter.entities or (None,)]
        return places


def unknown_template(name: str) -> str:
    return f"template {shorten(name)} is not active; rerun/re-subscribe and start from cursor"
