"""What the pipeline offers to have listed: the one body of a publication, as it is sent and as it is read."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class PublishInput(msgspec.Struct, frozen=True):
    """What something was built from: a segment or a companion."""

    object: str
    sha256: str


class PublishedObject(msgspec.Struct, frozen=True):
    """What was built, and is in the store: a companion, or a segment (`companions.SEGMENT`)."""

    family: str
    first: int
    last: int
    rows: int
    object: str
    bytes: int
    sha256: str
    stats: dict[str, Any] = {}


class UnbuildableInput(msgspec.Struct, frozen=True):
    """An input that nothing can be built from."""

    object: str
    code: str
    message: str


class PublishRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Sent again and again, always the same bytes, until there is an answer."""

    stream_id: str
    job: Literal["companions", "merge", "compact"]
    plan_hash: str
    inputs: list[PublishInput]
    writer: str = ""
    add: list[PublishedObject] = []
    replace: list[str] = []
    quarantine: list[UnbuildableInput] = []
