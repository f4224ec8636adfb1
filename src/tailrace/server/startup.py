"""Before the server listens: restore from the bucket (`--bootstrap`), and create the streams declared in a
file.

A declared stream that exists already has to be as the file says. Existing streams are never changed: a
difference stops the start, and the operator changes the stream or the file.
"""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tailrace.common.clock import SYSTEM_CLOCK
from tailrace.common.errors import TailraceError
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Setting, Settings, SettingsError, parse_setting
from tailrace.common.timestamps import parse_duration_s
from tailrace.log.decide import CreateRequest
from tailrace.log.model import Lifetime, Stream
from tailrace.log.transaction import await_commit
from tailrace.protocol.http_headers import is_json
from tailrace.protocol.stream_names import check_creatable_name
from tailrace.routing.context import Context
from tailrace.schema.append_validation import PROFILE_DOCUMENT
from tailrace.schema.profiles.profile import GENERIC, Profile, parse_profile, profile_document, read_profile
from tailrace.schema.registry import Registry, read_registry
from tailrace.schema.registry_update import decide_update, json_equal
from tailrace.schema.routes import prepare_registry_update, profile_changes, registry_document
from tailrace.schema.stream_schema import SCHEMA_DOCUMENT
from tailrace.search.query_language import check_rollup_includes
from tailrace.storage.data_directory import DataDirectory

if TYPE_CHECKING:
    from tailrace.storage.bootstrap import BootstrapReport


async def restore_from_bucket(
    settings: Settings, directory: DataDirectory, stop: asyncio.Event
) -> BootstrapReport | None:
    """What was restored; None without `--bootstrap`, or if the process was stopped before it was done."""
    if not settings.bootstrap:
        return None
    from tailrace.storage.bootstrap import bootstrap

    work = asyncio.create_task(bootstrap(settings, directory, SYSTEM_CLOCK))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
    finally:
        stopping.cancel()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    return None


def record_restore(restored: BootstrapReport, telemetry: ServerMetrics) -> None:
    telemetry.bootstraps.value += 1
    telemetry.bootstrap_seconds.value = restored.seconds
    telemetry.bootstrap_problems.value = restored.problems_count
    for kind in ("streams", "tombstones", "segments", "entries", "producers", "subscriptions"):
        telemetry.bootstrap_restored.values[(kind,)] = getattr(restored, kind)
    telemetry.bootstrap_restored.values[("bytes",)] = restored.payload_bytes


FILE_BYTES_MAX: Final = 4 * 1024 * 1024
STREAMS_MAX: Final = 10_000
_RETENTION_BYTES: Final = Setting(name="retention_bytes", kind="int", default=0, help="", unit="bytes")


class DeclaredStream(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stream of the file. Absent fields get the defaults, or the values of an existing stream."""

    content_type: str | None = None
    ttl: str | int | None = None
    retention: str | int | None = None
    retention_bytes: str | int | None = None
    profile: str | dict[str, Any] | None = None
    schema: dict[str, Any] | None = None
    schema_file: str | None = None
    routing_key: str | dict[str, Any] | None = None
    search: dict[str, Any] | None = None

    def lifetime(self) -> Lifetime:
        bytes_max = self.retention_bytes
        if isinstance(bytes_max, str):
            bytes_max = int(parse_setting(_RETENTION_BYTES, bytes_max))
        return Lifetime(
            _parse_window_s(self.ttl, "ttl"), None, _parse_window_s(self.retention, "retention"), bytes_max
        )

    def parsed_profile(self) -> Profile:
        if self.profile is None:
            return GENERIC
        return parse_profile({"kind": self.profile} if isinstance(self.profile, str) else self.profile)

    def registry_update(self, directory: Path) -> dict[str, object]:
        """The body of an equivalent POST to `_schema`; empty if nothing of it is declared."""
        body: dict[str, object] = {}
        if self.schema is not None and self.schema_file is not None:
            raise SettingsError("use either schema or schema_file, not both")
        if self.schema_file is not None:
            body["schema"] = msgspec.json.decode((directory / self.schema_file).read_bytes())
        elif self.schema is not None:
            body["schema"] = self.schema
        if self.routing_key is not None:
            pointer = self.routing_key
            body["routingKey"] = (
                {"jsonPointer": pointer, "required": False} if isinstance(pointer, str) else pointer
            )
        if self.search is not None:
            body["search"] = self.search
        return body


class _DeclaredFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    streams: dict[str, DeclaredStream]


def load_declared_streams(file: Path) -> dict[str, DeclaredStream]:
    """The streams of a file by name."""
    try:
        raw = file.read_bytes()
        if len(raw) > FILE_BYTES_MAX:
            raise SettingsError(f"the file must have at most {FILE_BYTES_MAX} bytes")
        streams = msgspec.convert(tomllib.loads(raw.decode()), _DeclaredFile).streams
        if len(streams) > STREAMS_MAX:
            raise SettingsError(f"the file must declare at most {STREAMS_MAX} streams")
    except (OSError, ValueError) as error:  # invalid TOML, UTF-8 and fields are ValueErrors
        raise TailraceError("invalid_request", f"{file}: {error}") from None
    return streams


class DeclaredStreamInstaller:
    """Creates the streams of one file, each as a request would."""

    def __init__(self, context: Context, file: Path, is_elsewhere: Callable[[str], bool]) -> None:
        """`is_elsewhere` returns whether another worker creates the stream of a name."""
        self._is_elsewhere = is_elsewhere
        self._log = context.log
        self._loop = context.loop
        self._name_bytes = context.limits.name_bytes
        self._file = file

    async def make(self) -> int:
        """Create all streams; returns their number when they are durable, raises at the first error.

        Streams of another worker are created there.
        """
        declared = load_declared_streams(self._file)
        streams = {name: declared[name] for name in declared if not self._is_elsewhere(name)}
        for name, one in streams.items():
            try:
                await self._make(name, one)
            except (TailraceError, SettingsError, OSError, msgspec.MsgspecError) as error:
                reason = error.message if isinstance(error, TailraceError) else str(error)
                raise TailraceError("conflict", f"{self._file}: stream {name!r}: {reason}") from None
        return len(streams)

    async def _make(self, name: str, declared: DeclaredStream) -> None:
        check_creatable_name(name, self._name_bytes)
        profile, update = declared.parsed_profile(), declared.registry_update(self._file.parent)
        content_type = declared.content_type
        if (profile is not GENERIC or update) and content_type is not None and not is_json(content_type):
            raise SettingsError("a profile or a schema requires the content type application/json")
        known = self._log.find(name)
        if known is None and update:
            # Check it before the stream is created, which would have to be deleted otherwise.
            await self._loop.run_in_executor(
                None, prepare_registry_update, Registry(name=name).to_json(), update, check_rollup_includes
            )
        # A stream that was closed later does not differ from its declaration.
        closed = known is not None and known.closed
        request = CreateRequest(name, content_type, declared.lifetime(), closed)
        await await_commit(lambda reply: self._log.create(request, reply, None))
        stream = self._log.existing(name)
        if declared.profile is not None:
            await self._install(stream, profile)
        if update:
            await self._register(stream, update)

    async def _install(self, stream: Stream, profile: Profile) -> None:
        current = read_profile((stream.documents or {}).get(PROFILE_DOCUMENT))
        if profile_document(current) == profile_document(profile):
            return
        if current.kind != GENERIC.kind:
            raise SettingsError(f"the stream exists with another profile ({current.kind})")
        changes = profile_changes(stream, profile)
        await await_commit(lambda reply: self._log.describe_all(stream, changes, reply))

    async def _register(self, stream: Stream, update: dict[str, object]) -> None:
        before = registry_document(stream, stream.documents)
        registry = read_registry(before)
        if stream.content_type is not None and not stream.json:
            raise SettingsError(f"a schema requires application/json, the stream has {stream.content_type}")
        is_new = not registry.version and registry.routing_key is None
        if registry.version and "schema" in update:
            if not json_equal(update.pop("schema"), registry.schemas[registry.version]):
                raise SettingsError(
                    "the stream exists with another schema; use `tailrace schema evolve` for a new version"
                )
            if not update:
                return
        registry, prepared = await self._loop.run_in_executor(
            None, prepare_registry_update, before, update, check_rollup_includes
        )
        after = decide_update(registry, prepared, stream.tail).to_json()
        if after == before:
            return
        if not is_new:
            raise SettingsError("the stream exists with another routing key or other search fields")
        await await_commit(lambda reply: self._log.describe(stream, SCHEMA_DOCUMENT, after, reply))


def _parse_window_s(value: str | int | None, what: str) -> int | None:
    return None if value is None else parse_duration_s(str(value), what)
