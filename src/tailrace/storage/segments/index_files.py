"""Index files beside the segments: what is recorded about each, index plans, the publish request.

An index file is built by the pipeline from segments or other index files, created once and never changed. The
manifest of the stream lists the valid ones. See docs/formats.md, "Companions".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

NAME_HASH_DIGITS = 16
SEGMENT_FAMILY = "segment"  # instead of a family: the publication adds a segment
_NAME = re.compile(
    r"companions/(?P<plan>[0-9a-f]{16})/(?P<family>[a-z_]{1,32})/"
    r"(?P<first>\d{20})-(?P<last>\d{20})\.(?P<hash>[0-9a-f]{16})\.(?P<ext>[a-z0-9]{1,16})"
)


class IndexFile(msgspec.Struct, frozen=True, array_like=True):
    """One file. The order never changes."""

    family: str
    first: int  # first entry
    last: int
    rows: int
    object: str  # key, relative to the folder of the stream
    bytes: int
    sha256: str
    stats: dict[str, Any]
    plan_hash: str  # of the plan it was built by
    level: int = 0  # how many times it was merged
    fingerprint: str = ""  # of its family in that plan: equal means built alike
    at_ns: int = 0  # when it was published


class QuarantinedSegment(msgspec.Struct, frozen=True, array_like=True):
    """A segment for which no index files can be built with a plan."""

    object: str
    first: int
    last: int
    plan_hash: str
    code: str
    message: str
    at_ns: int = 0


class PlanRecord(msgspec.Struct, frozen=True):
    """A plan that index files of a stream were, or are to be, built with."""

    generation: int
    hash: str
    families: dict[str, str]  # with their fingerprints
    fingerprints: dict[str, str] = {}  # by `field:<name>` and `rollup:<name>`


class PlanHistory(msgspec.Struct, frozen=True, omit_defaults=True):
    """The stream's document `index`: its plans, the current one last, and whether it has keyed entries."""

    keyed: bool = False
    plans: tuple[PlanRecord, ...] = ()

    @property
    def wanted(self) -> PlanRecord | None:
        return self.plans[-1] if self.plans else None

    def plan(self, plan_hash: str) -> PlanRecord | None:
        """One of the plans that are remembered."""
        return next((plan for plan in self.plans if plan.hash == plan_hash), None)


def index_file_name(plan_hash: str, family: str, first: int, last: int, sha256: str, ext: str) -> str:
    """The key of an index file in its stream's folder: a function of plan, range and content."""
    plan = plan_hash.removeprefix("sha256:")[:NAME_HASH_DIGITS]
    return f"companions/{plan}/{family}/{first:020}-{last:020}.{sha256[:NAME_HASH_DIGITS]}.{ext}"


def plan_name(plan_hash: str) -> str:
    return f"plans/{plan_hash.removeprefix('sha256:')}.json"


def has_valid_name(index_file: IndexFile) -> bool:
    """Whether the name matches what is recorded about the index file."""
    found = _NAME.fullmatch(index_file.object)
    if found is None:
        return False
    return (
        found["plan"] == index_file.plan_hash.removeprefix("sha256:")[:NAME_HASH_DIGITS]
        and found["family"] == index_file.family
        and int(found["first"]) == index_file.first
        and int(found["last"]) == index_file.last
    )


def index_file_range(relative_key: str) -> tuple[int, int] | None:
    """First and last entry in the name of an index file; None if it is not such a name."""
    found = _NAME.fullmatch(relative_key)
    return None if found is None else (int(found["first"]), int(found["last"]))


def sort_index_files(index_files: Iterable[IndexFile]) -> tuple[IndexFile, ...]:
    return tuple(sorted(index_files, key=lambda one: (one.family, one.first, one.last, one.object)))


# Described for OpenAPI; checked when the publication is verified.
StreamId = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": "^[0-9a-f]{32}$"})]
Sha256 = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": "^[0-9a-f]{64}$"})]
Count = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 0})]


class PublishInput(msgspec.Struct, frozen=True):
    """An input of a build: a segment or an index file."""

    object: str
    sha256: Sha256


class PublishedObject(msgspec.Struct, frozen=True):
    """An output of a build that is in the store: an index file, or a segment (`SEGMENT_FAMILY`)."""

    family: str
    first: Count
    last: Count
    rows: Count
    object: str
    bytes: Count
    sha256: Sha256
    stats: dict[str, Any] = {}


class UnbuildableInput(msgspec.Struct, frozen=True):
    """An input that nothing can be built from."""

    object: str
    code: str
    message: str


class PublishRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a publication. It is repeated with the same bytes until there is a response."""

    stream_id: StreamId
    job: Literal["companions", "merge", "compact"]
    plan_hash: str
    inputs: list[PublishInput]
    writer: str = ""
    add: list[PublishedObject] = []
    replace: list[str] = []
    quarantine: list[UnbuildableInput] = []
