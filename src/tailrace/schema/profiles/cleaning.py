"""Attributes before anybody stores them: secrets, statements and query strings go, the rest is bounded.

Everything here is done to every map of attributes of a span alike, so that what is taken out of one place
does not turn up in another.
"""

from __future__ import annotations

import re
from typing import Final, cast

from tailrace.schema.profiles.config import OtelConfig
from tailrace.schema.profiles.redaction import PATH_CHARACTERS_MAX, PATHS_MAX, REDACTED

OTEL_SECRETS: Final = frozenset(
    {"password", "token", "secret", "authorization", "cookie"}
    | {"apikey", "api_key", "set_cookie", "x_api_key"}
)
STATEMENTS: Final = frozenset({"db.statement", "db.query.text", "db.query.parameter", "db.query.parameters"})
_PARAMETER: Final = "db.query.parameter."
QUERIES: Final = frozenset({"url.query", "url.fragment"})
# Values that are a path with a query behind it, without a scheme in front.
TARGETS: Final = frozenset({"http.target", "url.path", "url.original", "http.path", "http.url", "url.full"})
DEPTH_MAX: Final = 32  # of a value inside a value
KEY_CHARACTERS_CACHED: Final = 100
KEYS_CACHED_MAX: Final = 4096

PLAIN, TARGET, SECRET, DROPPED = range(4)  # what becomes of an attribute, by its key

_URL_END = re.compile(r"[\s\"'<>]")
_QUERY = re.compile(r"[?#]")

Attributes = dict[str, object]


class AttributeCleaner:
    """Cleans the parts of one span after the other, and remembers where it took secrets away."""

    __slots__ = ("_bytes_max", "_count_max", "_drops_queries", "_fates", "found")

    def __init__(self, config: OtelConfig, fates: AttributeRules) -> None:
        self._fates = fates
        self._bytes_max = config.attribute_limits.max_attribute_value_bytes
        self._count_max = config.attribute_limits.max_attributes_per_span
        self._drops_queries = fates.drops_queries
        self.found: set[str] = set()

    def attributes(self, value: object, place: str) -> tuple[Attributes, int]:
        """A map as it is stored, and how many of its members had to go for want of room."""
        if type(value) is not dict:
            return {}, 0
        given = cast("Attributes", value)
        kept: Attributes = {}
        fate_of = self._fates.of
        cut = 0
        for key, item in given.items():
            if item is None or not key:
                continue
            if len(kept) >= self._count_max:
                cut += 1
                continue
            fate = fate_of(key)
            if fate == PLAIN and type(item) is str:
                kept[key] = self._plain(item)
            elif fate != DROPPED:
                kept[key] = self._value(key, fate, item, place, 0)
        return kept, cut

    def text(self, value: object) -> str | None:
        """Text of a span that is no attribute."""
        if type(value) is not str:
            return None
        return self._plain(value) or None

    def _plain(self, text: str) -> str:
        if self._drops_queries and "://" in text:
            text = strip_url_queries(text)
        return text if len(text) * 4 <= self._bytes_max else truncate_utf8(text, self._bytes_max)

    def target(self, text: str | None) -> str | None:
        """A path or a URL, without what follows its path."""
        return _QUERY.split(text, 1)[0] if text is not None and self._drops_queries else text

    def _value(self, key: str, fate: int, item: object, place: str, depth: int) -> object:
        if fate == SECRET:
            if len(self.found) < PATHS_MAX:
                self.found.add(f"{place}.{key}"[:PATH_CHARACTERS_MAX])
            return REDACTED
        return self._cleaned(fate, item, f"{place}.{key}", depth)

    def _cleaned(self, fate: int, item: object, place: str, depth: int) -> object:
        if type(item) is str:
            if fate == TARGET:
                return truncate_utf8(self.target(item) or "", self._bytes_max)
            return self._plain(item)
        if type(item) is list:
            items = cast("list[object]", item)
            if depth > DEPTH_MAX:
                return None
            return [self._cleaned(fate, one, place, depth + 1) for one in items]
        if type(item) is dict:
            members = cast("Attributes", item)
            if depth > DEPTH_MAX:
                return None
            fates = ((name, self._fates.of(name), one) for name, one in members.items())
            return {
                name: self._value(name, inner, one, place[:PATH_CHARACTERS_MAX], depth + 1)
                for name, inner, one in fates
                if inner != DROPPED
            }
        return item


class AttributeRules:
    """What becomes of attributes, by their keys. Spans of one service have the same few keys."""

    __slots__ = ("_drops_statements", "_known", "_secrets", "drops_queries")

    def __init__(self, config: OtelConfig) -> None:
        self._secrets = configured_secrets(config)
        self._drops_statements = config.db_statement_mode == "drop"
        self.drops_queries = config.url_mode == "drop_query"
        self._known: dict[str, int] = {}

    def of(self, key: str) -> int:
        fate = self._known.get(key)
        if fate is None:
            fate = self._fate(key)
            if len(key) <= KEY_CHARACTERS_CACHED:
                if len(self._known) >= KEYS_CACHED_MAX:
                    self._known.clear()
                self._known[key] = fate
        return fate

    def _fate(self, key: str) -> int:
        name = key.lower()
        if self._drops_statements and (name in STATEMENTS or name.startswith(_PARAMETER)):
            return DROPPED
        if self.drops_queries and name in QUERIES:
            return DROPPED
        if is_secret(key, self._secrets):
            return SECRET
        return TARGET if self.drops_queries and name in TARGETS else PLAIN


def configured_secrets(config: OtelConfig) -> frozenset[str]:
    return OTEL_SECRETS | {key.replace("-", "_") for key in config.redact_keys}


def is_secret(key: str, secrets: frozenset[str]) -> bool:
    """Whether a name, or what follows its last dot, dash or underscore, is one of a secret."""
    name = key.lower()
    plain = name.replace("-", "_")
    if plain in secrets or plain.rpartition(".")[2] in secrets:
        return True
    return name.rpartition("-")[2] in secrets or plain.rpartition("_")[2] in secrets


def strip_url_queries(text: str) -> str:
    """The text with every URL in it cut behind its path. One pass, whatever the text."""
    at = text.find("://")
    if at < 0:
        return text
    pieces: list[str] = []
    copied = 0
    while at >= 0:
        ends = _URL_END.search(text, at)
        end = len(text) if ends is None else ends.start()
        query = _QUERY.search(text, at, end)
        if query is not None:
            pieces.append(text[copied : query.start()])
            copied = end
        at = text.find("://", end)
    pieces.append(text[copied:])
    return "".join(pieces)


def truncate_utf8(text: str, bytes_max: int) -> str:
    """As much of the text as fits, whole characters only."""
    if len(text) * 4 <= bytes_max:
        return text
    encoded = text.encode("utf-8", "surrogatepass")
    if len(encoded) <= bytes_max:
        return text
    return encoded[:bytes_max].decode("utf-8", "ignore")
