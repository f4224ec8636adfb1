"""Media types: JSON mode, text or binary, and comparison without parameters."""

from __future__ import annotations

from functools import lru_cache

DEFAULT_CONTENT_TYPE = "application/octet-stream"
JSON_MEDIA_TYPE = "application/json"
CONTENT_TYPE_BYTES_MAX = 256


@lru_cache(maxsize=1024)
def media_type(content_type: str) -> str:
    """The type without parameters, in lower case: what two content types are compared by."""
    return content_type.partition(";")[0].strip().lower()


@lru_cache(maxsize=1024)
def is_json(content_type: str | None) -> bool:
    return content_type is not None and media_type(content_type) == JSON_MEDIA_TYPE


@lru_cache(maxsize=1024)
def is_text(content_type: str | None) -> bool:
    """Whether SSE and WebSocket carry the payload as text; anything else is base64."""
    if content_type is None:
        return False
    media = media_type(content_type)
    return media == JSON_MEDIA_TYPE or media.startswith("text/")


def is_valid_content_type(content_type: str) -> bool:
    """A type, a slash, a subtype, and nothing that could break a header line."""
    if len(content_type) > CONTENT_TYPE_BYTES_MAX or not content_type.isprintable():
        return False
    kind, slash, sub = media_type(content_type).partition("/")
    return bool(kind and slash and sub)
