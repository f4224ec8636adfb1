"""Masking: values of chosen fields become names that say nothing, equal values equal names.

Queries are masked along. One that does anything with a masked field but compare it for equality would not
mean the same any more, and is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec
import orjson

from tailrace.watch import cel
from tailrace.watch.cel import Call, Const, Node, Select, as_constant, children, field_path
from tailrace.watch.document import ChangeEntry
from tailrace.watch.external_matching import (
    EncodedPart,
    SubscriptionSummary,
    decode_predicate_part,
    interest_from_summary,
)
from tailrace.watch.predicate import canonical_predicate

COPIED_CHARACTERS_MIN: Final = 3  # a shorter text is found everywhere

FieldPath = tuple[str, ...]


class UnmaskableError(Exception):
    """The query would mean something else."""


class Masker:
    """Knows the fields, and a secret that is thrown away with it."""

    def __init__(self, fields: Sequence[str], secret: bytes) -> None:
        self._paths: list[FieldPath] = [tuple(field.split(".")) for field in fields]
        self._secret = secret
        self._id = ("id",) in self._paths

    # -- values ----------------------------------------------------------------------------------------

    def value(self, value: Any) -> Any:
        """A name for a value; null stays, lists and maps keep their form. Keys of a map are values, too."""
        if value is None:
            return None
        if isinstance(value, list):
            return [self.value(item) for item in cast("list[Any]", value)]
        if isinstance(value, dict):
            items = cast("dict[str, Any]", value).items()
            return {self.value(name): self.value(item) for name, item in items}
        plain: Any = value
        # Numbers are equal across their kinds, and truth values are no numbers.
        said = float(plain) if type(plain) in (int, float) else plain
        digest = hashlib.blake2b(orjson.dumps([said]), key=self._secret, digest_size=12).hexdigest()
        return f"masked-{digest}"

    def document_id(self, name: str) -> str:
        return cast("str", self.value(name)) if self._id else name

    def document(self, data: Any, copied: set[str]) -> Any:
        """A document without its masked values; those that are texts are gathered."""
        for path in self._paths:
            data = self._at(data, path, copied)
        return data

    def _at(self, data: Any, path: FieldPath, copied: set[str]) -> Any:
        if isinstance(data, list):
            return [self._at(item, path, copied) for item in cast("list[Any]", data)]
        if not isinstance(data, dict) or path[0] not in data:
            return cast("Any", data)
        found = dict(cast("dict[str, Any]", data))
        name = path[0]
        if len(path) > 1:
            found[name] = self._at(found[name], path[1:], copied)
        else:
            _collect_texts(found[name], copied)
            found[name] = self.value(found[name])
        return found

    def scrubbed(self, data: Any, copied: set[str]) -> Any:
        """Without texts that repeat a masked value."""
        if isinstance(data, str):
            return self.value(data) if any(secret in data for secret in copied) else data
        if isinstance(data, list):
            return [self.scrubbed(item, copied) for item in cast("list[Any]", data)]
        if isinstance(data, dict):
            items = cast("dict[str, Any]", data).items()
            return {self.scrubbed(name, copied): self.scrubbed(item, copied) for name, item in items}
        return data

    def change(self, entry: ChangeEntry) -> ChangeEntry:
        copied: set[str] = set()
        if self._id:
            copied.add(entry.documentKey)
        images = [orjson.loads(bytes(image)) for image in (entry.before, entry.after)]
        masked = [self.document(image, copied) for image in images]
        before, after = (msgspec.Raw(orjson.dumps(self.scrubbed(image, copied))) for image in masked)
        # What a caller named a write may say anything.
        return msgspec.structs.replace(
            entry,
            before=before,
            after=after,
            documentKey=self.document_id(entry.documentKey),
            writeId=None,
            writeDigest=msgspec.UNSET,
        )

    # -- queries ---------------------------------------------------------------------------------------

    def summary(self, summary: SubscriptionSummary) -> SubscriptionSummary | None:
        """The subscription with masked values; None if it cannot be had."""
        try:
            parts = [self._part(form) for form in summary.parts]
            rule = None if summary.ruleInputs is None else self._part(summary.ruleInputs)
        except UnmaskableError:
            return None
        documents = summary.documents
        if documents is not None:
            documents = sorted(self.document_id(name) for name in documents)
        masked = msgspec.structs.replace(summary, parts=parts, ruleInputs=rule, documents=documents)
        whole = interest_from_summary(masked).whole
        forms = parts if rule is None else [*parts, rule]
        named = None if documents is None else frozenset(documents)
        meaning = canonical_predicate([decode_predicate_part(form) for form in forms], named)
        return msgspec.structs.replace(masked, predicate=meaning, predicateHash=whole.hash.hex())

    def _part(self, form: EncodedPart) -> EncodedPart:
        node = cel.decode_expression(form.tree)
        masked = self._node(node)
        if form.text is not None and (self._mentions(node) or form.variables is not None):
            raise UnmaskableError  # the text, or what the rule was told, would give it away
        return EncodedPart(cel.encode_expression(masked), form.text)

    def _node(self, node: Node) -> Node:
        if isinstance(node, Call):
            if len(node.args) == 2 and node.function in ("_==_", "_!=_", "@in"):
                for place, other in ((0, 1), (1, 0)):
                    path, literal = field_path(node.args[place]), as_constant(node.args[other])
                    if path is not None and literal is not None and path in self._paths:
                        args = list(node.args)
                        args[other] = Const(self.value(literal.value))
                        return Call(node.function, tuple(args))
            if self._is_about(node):
                raise UnmaskableError
            return Call(node.function, tuple(self._node(argument) for argument in node.args))
        if isinstance(node, Select) and node.test:
            path = field_path(Select(node.operand, node.field))
            if path is not None and path not in self._paths and self._is_below(path):
                raise UnmaskableError
            return node  # whether a field is there is not masked
        if self._mentions(node):
            raise UnmaskableError
        return node

    def _is_about(self, node: Node) -> bool:
        """Whether a masked field is a plain argument of a call that is not a comparison for equality."""
        if not isinstance(node, Call) or node.function in ("_&&_", "_||_", "!_"):
            return False
        return any(self._mentions(argument) for argument in node.args)

    def _is_below(self, path: FieldPath) -> bool:
        return any(path[: len(masked)] == masked for masked in self._paths)

    def _mentions(self, node: Node) -> bool:
        path = field_path(node)
        if path is not None:
            return any(path[: len(one)] == one[: len(path)] for one in self._paths)
        return any(self._mentions(child) for child in children(node))


def _collect_texts(value: Any, copied: set[str]) -> None:
    if isinstance(value, str):
        if len(value) >= COPIED_CHARACTERS_MIN:
            copied.add(value)
    elif isinstance(value, list):
        for item in cast("list[Any]", value):
            _collect_texts(item, copied)
    elif isinstance(value, dict):
        for name, item in cast("dict[str, Any]", value).items():
            _collect_texts(name, copied)
            _collect_texts(item, copied)
