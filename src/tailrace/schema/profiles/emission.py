"""Which keys a change touches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, cast

from msgspec import Struct

from tailrace.schema.profiles.keys import (
    encode_argument,
    field_key,
    membership_key,
    template_id,
    template_key,
    watch_key,
)
from tailrace.schema.profiles.state_protocol import Change

KEYS_PER_CHANGE_MAX: Final = 10_000  # beyond, a change is told coarsely

Row = dict[str, object]


class Template(Struct):
    """A shape of queries: all rows of an entity with certain values in certain fields."""

    entity: str
    fields: tuple[tuple[str, str], ...]  # names in the order of their bytes, each with its encoding
    active_from: int  # the first sequence number it is told about
    last_seen_ms: int
    ttl_ms: int
    identity: int = 0
    key: int = 0
    table_before: int | None = None  # generation of the entity's last change before, as far as it is known

    def __post_init__(self) -> None:
        self.identity = template_id(self.entity, [name for name, _ in self.fields])
        self.key = template_key(self.identity)

    def arguments(self, row: object) -> list[str] | None:
        """The row's values of the fields; None if one of them is missing or cannot be an argument."""
        if not isinstance(row, dict):
            return None
        found: list[str] = []
        for name, encoding in self.fields:
            argument = encode_argument(cast("Row", row).get(name), encoding)
            if argument is None:
                return None
            found.append(argument)
        return found


class TouchedKeys(Struct):
    """Fine keys, and whether those do not say everything: then every waiter on the entity has to wake."""

    keys: list[int]
    coarse: bool = False
    error: bool = False


def touched_keys(change: Change, templates: Iterable[Template], on_missing_before: str) -> TouchedKeys:
    """The fine keys of one change, for the templates that are active at it."""
    emission = TouchedKeys([])
    for template in templates:
        if change.operation == "insert":
            _row(emission, template, change.after)
        elif change.operation == "delete":
            image = change.after if change.before is None else change.before
            if not _has_template_fields(template, image):
                emission.coarse = True
            _row(emission, template, image)
        elif _has_both_images(template, change):
            _update(emission, template, change)
        else:
            emission.coarse = True
            emission.error = on_missing_before == "error"
            if on_missing_before == "skipBefore":
                _row(emission, template, change.after)
        if len(emission.keys) > KEYS_PER_CHANGE_MAX:
            return TouchedKeys([], coarse=True)
    return emission


def _has_template_fields(template: Template, image: object) -> bool:
    """Whether the image has the template's fields. One without them may belong to any set of arguments."""
    return isinstance(image, dict) and all(name in image for name, _ in template.fields)


def _has_both_images(template: Template, change: Change) -> bool:
    """Whether both images are there, and the one before lacks no field that the one after has."""
    images = (change.before, change.after)
    if not all(isinstance(image, dict) for image in images):
        return False
    before, after = cast("tuple[Row, Row]", images)
    return all(name in before or name not in after for name, _ in template.fields)


def _row(emission: TouchedKeys, template: Template, row: object) -> None:
    arguments = template.arguments(row)
    if arguments is not None:
        emission.keys += (
            watch_key(template.identity, arguments),
            membership_key(template.identity, arguments),
        )


def _update(emission: TouchedKeys, template: Template, change: Change) -> None:
    old, new = template.arguments(change.before), template.arguments(change.after)
    tuples = [arguments for arguments in (old, new) if arguments is not None]
    if old == new:
        tuples = tuples[:1]
    changed = _changed_fields(cast("Row", change.before), cast("Row", change.after))
    if len(changed) * len(tuples) > KEYS_PER_CHANGE_MAX:
        emission.coarse = True
        changed = []
    for arguments in tuples:
        emission.keys.append(watch_key(template.identity, arguments))
        if old != new:
            emission.keys.append(membership_key(template.identity, arguments))
        emission.keys += [field_key(template.identity, name, arguments) for name in changed]


def _changed_fields(before: Row, after: Row) -> list[str]:
    """Fields whose scalar value is another one. True is not 1."""
    changed: list[str] = []
    for name in before.keys() | after.keys():
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict | list) and isinstance(new, dict | list):
            continue
        if old != new or isinstance(old, bool) != isinstance(new, bool):
            changed.append(name)
    return changed
