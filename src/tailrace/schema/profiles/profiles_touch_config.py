"""How a stream's touches are configured (`profile.touch`)."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from tailrace.schema.body import expect_object, invalid_request, shorten

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
CountOrNone = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class MemoryConfig(Struct, frozen=True, omit_defaults=True, rename="camel", forbid_unknown_fields=True):
    bucket_ms: Annotated[int, Meta(ge=1, le=60_000)] = 100
    filter_pow2: Annotated[int, Meta(ge=10, le=30)] = 22
    k: Annotated[int, Meta(ge=1, le=8)] = 4
    pending_max_keys: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000
    key_index_max_keys: Count = 32
    hot_key_ttl_ms: Count = 10_000
    hot_template_ttl_ms: Count = 10_000
    hot_max_keys: Count = 1_000_000
    hot_max_templates: Count = 4096


class TemplatesConfig(Struct, frozen=True, omit_defaults=True, rename="camel", forbid_unknown_fields=True):
    default_inactivity_ttl_ms: Count = 3_600_000
    last_seen_persist_interval_ms: Count = 300_000
    gc_interval_ms: Count = 60_000
    max_active_templates_per_entity: Annotated[int, Meta(ge=1, le=4096)] = 256
    max_active_templates_per_stream: Annotated[int, Meta(ge=1, le=65_536)] = 2048
    activation_rate_limit_per_minute: Count = 100


class TouchConfig(Struct, frozen=True, omit_defaults=True, rename="camel", forbid_unknown_fields=True):
    enabled: bool = False
    coarse_interval_ms: Annotated[int, Meta(ge=1, le=60_000)] = 100
    touch_coalesce_window_ms: Annotated[int, Meta(ge=1, le=60_000)] = 100
    on_missing_before: Literal["coarse", "skipBefore", "error"] = "coarse"
    lag_degrade_fine_touches_at_source_offsets: CountOrNone = 5000
    lag_recover_fine_touches_at_source_offsets: CountOrNone = 1000
    fine_touch_budget_per_batch: CountOrNone = 2000
    fine_tokens_per_second: CountOrNone = 200_000
    fine_burst_tokens: CountOrNone = 400_000
    lag_reserved_fine_touch_budget_per_batch: CountOrNone = 200
    memory: MemoryConfig = MemoryConfig()
    templates: TemplatesConfig = TemplatesConfig()

    def to_json(self) -> dict[str, object]:
        """What was asked for: `enabled` always, the rest where it differs from the default."""
        return {"enabled": self.enabled} | msgspec.to_builtins(self)


_PARTS: Final[dict[str, type[Struct]]] = {"memory": MemoryConfig, "templates": TemplatesConfig}


def parse_touch(body: object, path: str) -> TouchConfig:
    given = expect_object(body, path, _config_keys(TouchConfig))
    for part, kind in _PARTS.items():
        expect_object(given.get(part, {}), f"{path}.{part}", _config_keys(kind))
    try:
        return msgspec.convert(given, TouchConfig)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$")
        raise invalid_request(
            f"{path}{shorten(where.rstrip('`'))}: {reason[:1].lower()}{reason[1:]}"
        ) from None


def _config_keys(kind: type[Struct]) -> tuple[str, ...]:
    return tuple(field.encode_name for field in msgspec.structs.fields(kind))
