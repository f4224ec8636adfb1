"""The query templates of a stream: activated by clients, durable, retired when unused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, cast

import msgspec
from msgspec import Struct

from tailrace.schema.json_values import expect_array, expect_object, expect_string, invalid_request
from tailrace.schema.profiles.state_protocol import TemplatesConfig
from tailrace.schema.profiles.touch_keys import ENCODINGS, Template, format_key

DECLARED_MAX: Final = 256
FIELDS_MAX: Final = 3
NAME_CHARACTERS_MAX: Final = 256
TTL_MS_MAX: Final = 30 * 86_400_000
RETIRED_KEPT_MS: Final = 86_400_000
RETIRED_KEPT_MAX: Final = 65_536

TemplateDeclaration = tuple[str, tuple[tuple[str, str], ...]]


class DeniedTemplate(Struct, frozen=True):
    identity: int
    reason: str


def parse_templates(value: object, path: str) -> list[TemplateDeclaration | None]:
    """Templates of a request; one that cannot be a template is None, and denied by itself."""
    declared: list[TemplateDeclaration | None] = []
    for index, item in enumerate(expect_array(value, path, DECLARED_MAX)):
        at = f"{path}[{index}]"
        given = expect_object(item, at, ("entity", "fields"))
        entity = expect_string(given.get("entity"), f"{at}.entity")
        fields: dict[str, str] = {}
        for place, one in enumerate(expect_array(given.get("fields"), f"{at}.fields", 64)):
            field = expect_object(one, f"{at}.fields[{place}]", ("name", "encoding"))
            name = expect_string(field.get("name"), f"{at}.fields[{place}].name")
            fields[name] = expect_string(field.get("encoding", "string"), f"{at}.fields[{place}].encoding")
        declared.append(_checked(entity, fields, len(cast("list[object]", given["fields"]))))
    return declared


def _checked(entity: str, fields: dict[str, str], count: int) -> TemplateDeclaration | None:
    texts = (entity, *fields)
    usable = all(0 < len(text) <= NAME_CHARACTERS_MAX and "\0" not in text for text in texts)
    if not usable or not 1 <= count <= FIELDS_MAX or len(fields) != count:
        return None
    if not all(encoding in ENCODINGS for encoding in fields.values()):
        return None
    return entity, tuple(sorted(fields.items(), key=lambda field: field[0].encode("utf-8", "replace")))


def parse_ttl(given: dict[str, object], config: TemplatesConfig, path: str) -> int:
    if "inactivityTtlMs" not in given:
        return config.default_inactivity_ttl_ms
    ttl_ms = given["inactivityTtlMs"]
    if not isinstance(ttl_ms, int) or isinstance(ttl_ms, bool) or not 1 <= ttl_ms <= TTL_MS_MAX:
        raise invalid_request(f"{path}.inactivityTtlMs must be an integer from 1 to {TTL_MS_MAX}")
    return ttl_ms


class RetiredTemplate(Struct, frozen=True, array_like=True):
    """A template that is not active any more: what it was about, and up to which generation."""

    entity: str
    until_ms: int
    generation: int


class Templates:
    """Those that are active, and for a day the entities of those that were."""

    def __init__(self, config: TemplatesConfig) -> None:
        self.config = config
        self.active: dict[int, Template] = {}
        self.by_entity: dict[str, dict[int, Template]] = {}
        self.remembered: dict[int, RetiredTemplate] = {}
        self.unknown_before = 0  # up to this generation other templates were active
        self._minute = 0
        self._activations = 0
        self.seen = False  # used since it was last stored

    def load(self, stored: dict[str, object], generation: int) -> None:
        """From the durable form, for a stream of so many entries: it may have lost some of its newest."""
        for entity, fields, active_from, last_seen_ms, ttl_ms in cast(
            "list[tuple[str, list[tuple[str, str]], int, int, int]]", stored["templates"]
        ):
            named = tuple((name, encoding) for name, encoding in fields)
            self._add(Template(entity, named, min(active_from, generation), last_seen_ms, ttl_ms))
        for identity, *known in cast("list[list[object]]", stored["remembered"]):
            self.remembered[cast("int", identity)] = msgspec.convert(known, RetiredTemplate)
        self.unknown_before = cast("int", stored["unknownBefore"])

    def to_json(self) -> dict[str, object]:
        return {
            "templates": [
                (one.entity, one.fields, one.active_from, one.last_seen_ms, one.ttl_ms)
                for one in self.active.values()
            ],
            "remembered": [
                (identity, known.entity, known.until_ms, known.generation)
                for identity, known in self.remembered.items()
            ],
            "unknownBefore": self.unknown_before,
        }

    def activate(
        self,
        declared: TemplateDeclaration,
        ttl_ms: int,
        generation: int,
        now_ms: int,
        in_use: Callable[[int], bool],
    ) -> Template | DeniedTemplate:
        """The template, active from the generation on if it was not before."""
        entity, fields = declared
        template = Template(entity, fields, generation, now_ms, ttl_ms)
        known = self.active.get(template.identity)
        if known is not None:
            known.last_seen_ms, known.ttl_ms = now_ms, max(known.ttl_ms, ttl_ms)
            self.seen = True
            return known
        if not self._admit(now_ms):
            return DeniedTemplate(template.identity, "rate_limited")
        limits = self.config
        of_entity = self.by_entity.get(entity, {})
        for among, count_max in (
            (of_entity, limits.max_active_templates_per_entity),
            (self.active, limits.max_active_templates_per_stream),
        ):
            if not self._room(list(among.values()), count_max, template, in_use):
                return DeniedTemplate(template.identity, "limit")
        if template.identity in self.remembered:
            self._forget(template.identity)
        self._add(template)
        return template

    def touch(self, identities: Iterable[int], now_ms: int) -> None:
        for identity in identities:
            if (template := self.active.get(identity)) is not None:
                template.last_seen_ms = now_ms
                self.seen = True

    def retire_idle(self, generation: int, now_ms: int, in_use: Callable[[int], bool]) -> bool:
        """Retire unused templates. Returns whether there were any."""
        idle = [
            one
            for one in self.active.values()
            if one.last_seen_ms + one.ttl_ms <= now_ms and not in_use(one.identity)
        ]
        for template in idle:
            self._retire(template, generation, now_ms)
        forgotten = [identity for identity, known in self.remembered.items() if known.until_ms <= now_ms]
        for identity in forgotten:
            self._forget(identity)
        return bool(idle or forgotten)

    def _admit(self, now_ms: int) -> bool:
        minute = now_ms // 60_000
        if minute != self._minute:
            self._minute, self._activations = minute, 0
        self._activations += 1
        return self._activations <= self.config.activation_rate_limit_per_minute

    def _room(
        self, present: list[Template], count_max: int, newcomer: Template, in_use: Callable[[int], bool]
    ) -> bool:
        """Makes room below a cap by retiring who was not seen for longest."""
        if len(present) < count_max:
            return True
        free = [one for one in present if not in_use(one.identity)]
        if not free:
            return False
        oldest = min(free, key=lambda one: one.last_seen_ms)
        self._retire(oldest, newcomer.active_from, newcomer.last_seen_ms)
        return True

    def _add(self, template: Template) -> None:
        self.active[template.identity] = template
        self.by_entity.setdefault(template.entity, {})[template.identity] = template

    def _retire(self, template: Template, generation: int, now_ms: int) -> None:
        del self.active[template.identity]
        of_entity = self.by_entity[template.entity]
        del of_entity[template.identity]
        if not of_entity:
            del self.by_entity[template.entity]
        while len(self.remembered) >= RETIRED_KEPT_MAX:
            self._forget(next(iter(self.remembered)))
        known = RetiredTemplate(template.entity, now_ms + RETIRED_KEPT_MS, generation)
        self.remembered[template.identity] = known

    def _forget(self, identity: int) -> None:
        self.unknown_before = max(self.unknown_before, self.remembered.pop(identity).generation)


def activation_answer(
    activated: list[Template], denied: list[DeniedTemplate], epoch: str, config: TemplatesConfig
) -> dict[str, object]:
    return {
        "activated": [
            {
                "templateId": format_key(one.identity),
                "state": "active",
                "activeFromTouchOffset": f"{epoch}:{one.active_from}",
            }
            for one in activated
        ],
        "denied": [{"templateId": format_key(one.identity), "reason": one.reason} for one in denied],
        "limits": {
            "maxActiveTemplatesPerStream": config.max_active_templates_per_stream,
            "maxActiveTemplatesPerEntity": config.max_active_templates_per_entity,
        },
    }
