"""The `profile` resource of a stream: parsing, JSON form, and the changes it makes to the schema registry."""

from __future__ import annotations

from typing import Final, Protocol, cast

import msgspec

from tailrace.schema.json_values import expect_object, invalid_request
from tailrace.schema.profiles import canonical_registries, evlog, metrics, otel_spans, state_protocol
from tailrace.schema.profiles.canonical_registries import OTEL_REGISTRY
from tailrace.schema.profiles.evlog import Evlog, parse_evlog
from tailrace.schema.profiles.otel_spans import OtelSpans
from tailrace.schema.profiles.otlp_export import parse_otel
from tailrace.schema.profiles.state_protocol import TouchConfig, parse_touch
from tailrace.schema.registry import Registry, VersionBoundary, parse_routing_key
from tailrace.schema.search_config import parse_search_config

API_VERSION: Final = "durable.streams/profile/v1"
KINDS: Final = ("evlog", "generic", "metrics", "otel-traces", "state-protocol")

Json = dict[str, object]


class Profile(Protocol):
    """What a stream's records mean. `update` is the canonical registry, of the kinds that have one."""

    kind: str
    reencodes: bool  # whether records are stored as the profile writes them, not as they were sent
    checks: bool  # whether it looks at records at all
    update: Json | None

    def to_json(self) -> Json: ...

    def accept(self, record: object, now_ms: int) -> object:
        """The record as it is stored, or the refusal it deserves. The one given is used up."""
        ...

    def default_key(self, record: object) -> str | None:
        """The routing key where neither the schema nor the request has one."""
        ...


class GenericProfile:
    kind = "generic"
    reencodes = checks = False
    update: Json | None = None

    def to_json(self) -> Json:
        return {"kind": self.kind}

    def accept(self, record: object, now_ms: int) -> object:
        return record

    def default_key(self, record: object) -> str | None:
        return None


class EvlogProfile:
    kind = "evlog"
    reencodes = checks = True
    update: Json | None = canonical_registries.EVLOG_REGISTRY

    def __init__(self, body: Json, path: str) -> None:
        self.config = parse_evlog(body, path)
        self.accept = Evlog(self.config).normalise

    def to_json(self) -> Json:
        return self.config.to_json()

    def default_key(self, record: object) -> str | None:
        return evlog.evlog_routing_key(cast("Json", record))


class MetricsProfile:
    kind = "metrics"
    reencodes = checks = True
    update: Json | None = canonical_registries.METRICS_REGISTRY

    def to_json(self) -> Json:
        return {"kind": self.kind}

    def accept(self, record: object, now_ms: int) -> object:
        return metrics.normalise_metric(record)

    def default_key(self, record: object) -> str | None:
        return metrics.metric_routing_key(cast("Json", record))


class OtelTracesProfile:
    kind = "otel-traces"
    reencodes = checks = True
    update: Json | None = OTEL_REGISTRY

    def __init__(self, body: Json, path: str) -> None:
        self.config = parse_otel(body, path)
        self.accept = OtelSpans(self.config).normalise

    def to_json(self) -> Json:
        return self.config.to_json()

    def default_key(self, record: object) -> str | None:
        return otel_spans.span_routing_key(cast("Json", record))


class StateProtocolProfile:
    kind = "state-protocol"
    reencodes = False
    checks = True
    update: Json | None = None

    def __init__(self, touch: TouchConfig | None) -> None:
        self.touch = touch

    def to_json(self) -> Json:
        shown: Json = {"kind": self.kind}
        if self.touch is not None:
            shown["touch"] = self.touch.to_json()
        return shown

    def accept(self, record: object, now_ms: int) -> object:
        state_protocol.check_state_record(record)
        return record

    def default_key(self, record: object) -> str | None:
        return None


GENERIC: Final = GenericProfile()


def parse_profile_update(body: object) -> Profile:
    """The profile that a request asks for."""
    given = expect_object(body, "profileUpdate", ("apiVersion", "profile"))
    if given.get("apiVersion", API_VERSION) != API_VERSION:
        raise invalid_request("invalid profile apiVersion")
    return parse_profile(given.get("profile"))


def parse_profile(body: object) -> Profile:
    given = expect_object(body, "profile")
    kind = given.get("kind")
    if kind == "evlog":
        return EvlogProfile(given, "profile")
    if kind == "state-protocol":
        expect_object(given, "profile", ("kind", "touch"))
        touch = parse_touch(given["touch"], "profile.touch") if "touch" in given else None
        return StateProtocolProfile(touch)
    if kind == "otel-traces":
        return OtelTracesProfile(given, "profile")
    if kind not in ("generic", "metrics"):
        raise invalid_request(f"profile.kind must be {'|'.join(KINDS)}")
    expect_object(given, "profile", ("kind",))
    return GENERIC if kind == "generic" else MetricsProfile()


def read_profile(document: bytes | None) -> Profile:
    """A profile from its stored form; a stream without one is generic."""
    return GENERIC if document is None else parse_profile_update(msgspec.json.decode(document))


def profile_document(profile: Profile) -> bytes:
    """The resource, as it is shown and stored."""
    return msgspec.json.encode({"apiVersion": API_VERSION, "profile": profile.to_json()})


def needs_entry_check(new: Profile, current: Profile) -> bool:
    """Whether entries from before the profile have to be checked, so that it holds for them too."""
    return new.checks and new.kind != current.kind


def install_profile(
    new: Profile, current: Profile, registry: Registry, next_sequence: int, *, adopted: bool = False
) -> Registry:
    """The stream's registry after the installation of a profile; the same object if it does not change.

    Posting the installed kind again only changes its configuration: later changes of the registry stay.
    `adopted` is true if all entries are what the profile would have stored.
    """
    update = new.update
    if update is None or new.kind == current.kind:
        return registry
    if registry.version and registry.schemas.get(1) != update["schema"]:
        raise invalid_request(f"{new.kind} profile requires a stream without a user schema")
    if next_sequence and new.kind != "metrics" and not adopted:
        raise invalid_request(
            f"{new.kind} profile must be installed before appending data; with ?adopt=true (--adopt) the "
            "entries that are there are checked, and the profile holds from the first one on"
        )
    if registry.version:
        return registry
    routing_key = update.get("routingKey")
    return msgspec.structs.replace(
        registry,
        version=1,
        schemas={1: update["schema"]},
        boundaries=(VersionBoundary(0 if adopted else next_sequence, 1),),
        search=parse_search_config(update["search"]),
        routing_key=registry.routing_key if routing_key is None else parse_routing_key(routing_key),
    )


def is_canonical(profile: Profile, registry: Registry) -> bool:
    """Whether all that the profile writes is valid under the current schema: then it need not be checked."""
    return (
        profile.update is not None
        and registry.version == 1
        and (registry.schemas[1] == profile.update["schema"])
    )
