"""`tailrace pipeline capture`: a range of changes with the current subscriptions, sampled and masked.

Changes are sampled by document: either all changes of a document are captured or none. Masking replaces the
values of chosen fields by keyed hashes; equal values give equal hashes. Queries are masked too; a query that
uses a masked field other than in an equality comparison would change its meaning and is left out.

A capture is complete when `capture.json` exists.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, cast

import msgspec
import orjson
import xxhash

from tailrace.spark.live_queries.match_job import decode_entries
from tailrace.spark.live_queries.subscription_matcher import SubscriptionSet, decode_subscription_set
from tailrace.spark.live_queries.subscription_sets import read_subscription_set
from tailrace.spark.live_queries.watch_client import ChangeRange, RangeBound, WatchClient
from tailrace.spark.object_stores import shared_object_store
from tailrace.spark.options import store_url
from tailrace.storage.object_store.interface import ObjectMissingError
from tailrace.storage.segments.parquet import BINARY, INT32, INT64, STRING, pa, pq
from tailrace.watch import cel
from tailrace.watch.cel import Call, Const, Node, Select, as_constant, children, field_path
from tailrace.watch.document import ChangeEntry, encode_change
from tailrace.watch.external_matching import (
    EncodedPart,
    SubscriptionSummary,
    decode_predicate_part,
    interest_from_summary,
)
from tailrace.watch.predicate import canonical_predicate

COPIED_CHARACTERS_MIN: Final = 3  # copies of shorter texts are not searched: they occur everywhere

FieldPath = tuple[str, ...]


class UnmaskableError(Exception):
    """Masking would change the meaning of the query."""


class Masker:
    """Masks the values of the given fields by hashes with a secret key."""

    def __init__(self, fields: Sequence[str], secret: bytes) -> None:
        self._paths: list[FieldPath] = [tuple(field.split(".")) for field in fields]
        self._secret = secret
        self._id = ("id",) in self._paths

    # -- values ----------------------------------------------------------------------------------------

    def value(self, value: Any) -> Any:
        """The masked value.

        Null is unchanged; lists and maps are masked by element, keys of maps included.
        """
        if value is None:
            return None
        if isinstance(value, list):
            return [self.value(item) for item in cast("list[Any]", value)]
        if isinstance(value, dict):
            items = cast("dict[str, Any]", value).items()
            return {self.value(name): self.value(item) for name, item in items}
        plain: Any = value
        # Equal integers and doubles must have equal hashes; booleans are no numbers.
        normalized = float(plain) if type(plain) in (int, float) else plain
        digest = hashlib.blake2b(orjson.dumps([normalized]), key=self._secret, digest_size=12).hexdigest()
        return f"masked-{digest}"

    def document_id(self, name: str) -> str:
        return cast("str", self.value(name)) if self._id else name

    def document(self, data: Any, copied: set[str]) -> Any:
        """The document with its fields masked. Adds the masked texts to `copied`."""
        for path in self._paths:
            data = self._mask_path(data, path, copied)
        return data

    def _mask_path(self, data: Any, path: FieldPath, copied: set[str]) -> Any:
        if isinstance(data, list):
            return [self._mask_path(item, path, copied) for item in cast("list[Any]", data)]
        if not isinstance(data, dict) or path[0] not in data:
            return cast("Any", data)
        found = dict(cast("dict[str, Any]", data))
        name = path[0]
        if len(path) > 1:
            found[name] = self._mask_path(found[name], path[1:], copied)
        else:
            _collect_texts(found[name], copied)
            found[name] = self.value(found[name])
        return found

    def scrub(self, data: Any, copied: set[str]) -> Any:
        """Mask all texts that contain a masked value."""
        if isinstance(data, str):
            return self.value(data) if any(secret in data for secret in copied) else data
        if isinstance(data, list):
            return [self.scrub(item, copied) for item in cast("list[Any]", data)]
        if isinstance(data, dict):
            items = cast("dict[str, Any]", data).items()
            return {self.scrub(name, copied): self.scrub(item, copied) for name, item in items}
        return data

    def change(self, entry: ChangeEntry) -> ChangeEntry:
        copied: set[str] = set()
        if self._id:
            copied.add(entry.documentKey)
        images = [orjson.loads(bytes(image)) for image in (entry.before, entry.after)]
        masked = [self.document(image, copied) for image in images]
        before, after = (msgspec.Raw(orjson.dumps(self.scrub(image, copied))) for image in masked)
        # Clients choose the write id: it may contain anything.
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
        """The subscription with masked values; None if it cannot be masked."""
        try:
            parts = [self._part(form) for form in summary.parts]
            rule = None if summary.ruleInputs is None else self._part(summary.ruleInputs)
        except UnmaskableError:
            return None
        documents = summary.documents
        if documents is not None:
            documents = sorted(self.document_id(name) for name in documents)
        masked = msgspec.structs.replace(summary, parts=parts, ruleInputs=rule, documents=documents)
        whole = interest_from_summary(masked).predicate
        forms = parts if rule is None else [*parts, rule]
        named = None if documents is None else frozenset(documents)
        meaning = canonical_predicate([decode_predicate_part(form) for form in forms], named)
        return msgspec.structs.replace(masked, predicate=meaning, predicateHash=whole.hash.hex())

    def _part(self, form: EncodedPart) -> EncodedPart:
        node = cel.decode_expression(form.tree)
        masked = self._node(node)
        if form.text is not None and (self._mentions(node) or form.variables is not None):
            raise UnmaskableError  # the text or the variables of the rule would reveal the value
        return EncodedPart(cel.encode_expression(masked), form.text)

    def _node(self, node: Node) -> Node:
        if isinstance(node, Call):
            if len(node.args) == 2 and node.function in ("_==_", "_!=_", "@in"):
                for field, other in ((0, 1), (1, 0)):
                    path, literal = field_path(node.args[field]), as_constant(node.args[other])
                    if path is not None and literal is not None and path in self._paths:
                        args = list(node.args)
                        args[other] = Const(self.value(literal.value))
                        return Call(node.function, tuple(args))
            if self._uses_masked(node):
                raise UnmaskableError
            return Call(node.function, tuple(self._node(argument) for argument in node.args))
        if isinstance(node, Select) and node.test:
            path = field_path(Select(node.operand, node.field))
            if path is not None and path not in self._paths and self._is_below(path):
                raise UnmaskableError
            return node  # the presence of a field is not masked
        if self._mentions(node):
            raise UnmaskableError
        return node

    def _uses_masked(self, node: Node) -> bool:
        """Whether a masked field is an argument of a call other than a logical operator."""
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


CAPTURE_FILE: Final = "capture.json"
SUBSCRIPTIONS_FILE: Final = "subscriptions.json"
OBJECT_BYTES: Final = 8 << 20
CAPTURED_SCHEMA: Final = pa.schema(
    [
        ("stream", STRING),
        ("partition", INT32),
        ("entry", INT64),
        ("offset", STRING),
        ("timestamp_ns", INT64),
        ("value", BINARY),
    ]
)
CAPTURE_PART_SCHEMA: Final = pa.schema(
    [("object", STRING), ("rows", INT64), ("bytes", INT64), ("sha256", STRING)]
)
CAPTURE_PART_DDL: Final = "object string, rows bigint, bytes bigint, sha256 string"


class CaptureExistsError(ValueError):
    """The target has a capture already; captures are not overwritten."""


class CaptureOptions(NamedTuple):
    database: str
    collection: str
    out: str
    start: RangeBound = RangeBound("earliest")
    end: RangeBound = RangeBound("latest")
    sample: float = 1.0
    mask: tuple[str, ...] = ()


class CapturePart(msgspec.Struct, frozen=True):
    object: str
    rows: int
    bytes: int
    sha256: str


class Capture(msgspec.Struct, frozen=True):
    """`capture.json`: the options and parts of a capture."""

    database: str
    collection: str
    ranges: list[ChangeRange]
    sample: float
    mask: list[str]
    changes: int
    subscriptions: int
    leftOut: int  # noqa: N815 - subscriptions that could not be masked
    parts: list[CapturePart]
    v: int = 1


class CaptureTask(msgspec.Struct, frozen=True):
    out: str
    ranges: dict[str, ChangeRange]
    sample: float
    mask: list[str]
    secret: bytes


def run_capture(spark: Any, client: WatchClient, options: CaptureOptions) -> Capture:
    out = store_url(options.out)
    try:
        shared_object_store(out).get(CAPTURE_FILE)
    except ObjectMissingError:
        pass
    else:
        raise CaptureExistsError(f"capture already exists at {options.out}")
    client.check_matchable(options.database, options.collection)
    summaries = client.request_summaries(options.database)
    try:
        found = read_subscription_set(
            client.server, summaries.stream, summaries.offset, options.database, [options.collection]
        )
    finally:
        client.request_summaries(options.database, 0)
    ranges = client.ranges(options.database, options.collection, options.start, options.end)
    # Never stored, so that values cannot be guessed and verified later.
    secret = secrets.token_bytes(32)
    subscriptions = mask_subscriptions(found, Masker(options.mask, secret))
    task = CaptureTask(out, {one.stream: one for one in ranges}, options.sample, list(options.mask), secret)
    parts = _write_parts(spark, client, ranges, task) if ranges else []
    shared_object_store(out).create(SUBSCRIPTIONS_FILE, subscriptions.encode())
    capture = Capture(
        options.database,
        options.collection,
        ranges,
        options.sample,
        list(options.mask),
        sum(part.rows for part in parts),
        len(subscriptions.subs),
        len(found.subs) - len(subscriptions.subs),
        parts,
    )
    if not shared_object_store(out).create(CAPTURE_FILE, msgspec.json.encode(capture)):
        raise CaptureExistsError(f"another process has just written a capture to {options.out}")
    return capture


def mask_subscriptions(found: SubscriptionSet, masker: Masker) -> SubscriptionSet:
    masked = {key: masker.summary(one) for key, one in found.subs.items()}
    return SubscriptionSet({key: one for key, one in masked.items() if one is not None})


def _write_parts(
    spark: Any, client: WatchClient, ranges: Sequence[ChangeRange], task: CaptureTask
) -> list[CapturePart]:
    rows = client.frame(spark, ranges).mapInArrow(partial(capture_changes, task), CAPTURE_PART_DDL).collect()
    parts = [CapturePart(row["object"], row["rows"], row["bytes"], row["sha256"]) for row in rows]
    return sorted(parts, key=lambda part: part.object)


def capture_changes(task: CaptureTask, batches: Iterator[Any]) -> Iterator[Any]:
    """For `mapInArrow`: writes masked changes to objects of a few MiB, and returns a row for each object."""
    masker = Masker(task.mask, task.secret)
    rows: list[dict[str, Any]] = []
    size = 0
    for batch in batches:
        times: list[int] = batch.column("timestamp_ns").to_pylist()
        for entry, time_ns in zip(decode_entries(batch, task.ranges), times, strict=True):
            change = entry.change
            if change is None or not is_sampled(change.entry.documentKey, task.sample):
                continue
            value = encode_change(masker.change(change.entry))
            if rows and (size >= OBJECT_BYTES or rows[-1]["stream"] != entry.range.stream):
                yield _put_capture_part(task.out, rows)
                rows, size = [], 0
            rows.append(
                {
                    "stream": entry.range.stream,
                    "partition": entry.range.partition,
                    "entry": entry.seq,
                    "offset": entry.offset,
                    "timestamp_ns": time_ns,
                    "value": value,
                }
            )
            size += len(value)
    if rows:
        yield _put_capture_part(task.out, rows)


def is_sampled(document_key: str, share: float) -> bool:
    return xxhash.xxh3_64_intdigest(document_key.encode("utf-8", "surrogatepass"), seed=1) < share * 2**64


def _put_capture_part(out: str, rows: list[dict[str, Any]]) -> Any:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=CAPTURED_SCHEMA), sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    name = f"changes/{rows[0]['partition']:05}-{rows[0]['entry']:020}-{rows[-1]['entry']:020}.parquet"
    shared_object_store(out).create(name, data)
    row = {
        "object": name,
        "rows": len(rows),
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    return pa.RecordBatch.from_pylist([row], schema=CAPTURE_PART_SCHEMA)


# -- reading a capture -------------------------------------------------------------------------------------


def load_capture(url: str) -> tuple[Capture, SubscriptionSet]:
    store = shared_object_store(store_url(url))
    return (
        msgspec.json.decode(store.get(CAPTURE_FILE), type=Capture),
        decode_subscription_set(store.get(SUBSCRIPTIONS_FILE)),
    )


def read_capture_parts(url: str, batches: Iterator[Any]) -> Iterator[Any]:
    """For `mapInArrow`: the changes of the named parts."""
    store = shared_object_store(store_url(url))
    for batch in batches:
        for name, sha256 in zip(
            batch.column("object").to_pylist(), batch.column("sha256").to_pylist(), strict=True
        ):
            data = store.get(name)
            if hashlib.sha256(data).hexdigest() != sha256:
                raise ValueError(f"capture part {name} has the wrong SHA-256")
            yield from pq.read_table(pa.BufferReader(data), use_threads=False).to_batches()


CAPTURED_DDL: Final = (
    "stream string, partition int, entry bigint, offset string, timestamp_ns bigint, value binary"
)


def captured_frame(spark: Any, url: str, capture: Capture) -> Any:
    table = pa.Table.from_pylist(
        [{"object": part.object, "sha256": part.sha256} for part in capture.parts],
        schema=pa.schema([("object", STRING), ("sha256", STRING)]),
    )
    named = spark.createDataFrame(table).repartition(max(1, len(capture.parts)))
    return named.mapInArrow(partial(read_capture_parts, url), CAPTURED_DDL)
