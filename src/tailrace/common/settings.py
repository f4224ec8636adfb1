"""The table of settings.

A setting is a field of :class:`Settings` or of :class:`~tailrace.common.limits.Limits`. Its flag
(``--data-dir``), its variable (``TAILRACE_DATA_DIR``), its key in ``tailrace.toml`` (``data_dir``) and its
line in the documentation are derived from that field. `settings_loading.py` combines the sources.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from tailrace.common.limits import MIB, Limits
from tailrace.common.timestamps import parse_rfc3339_ms

ENV_PREFIX: Final = "TAILRACE_"
PORT_DEFAULT: Final = 4437

Port = Annotated[int, Meta(ge=0, le=65535)]
Secret = Annotated[str, Meta(extra={"secret": True})]


class SettingsError(ValueError):
    """Invalid setting; the message names it and its source."""


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of one server. Built by `load_settings`, or directly in tests."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Port to listen on; 0 selects a free port.")] = PORT_DEFAULT
    data_dir: Annotated[Path, Meta(description="Directory of the journal and the hot store.")] = Path(
        "./tailrace-data"
    )
    workers: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            extra={"unit": "count"},
            description="Worker processes that share the streams; limits apply per worker. Changing the "
            "number moves streams at start. 0: the number last used; in a new data directory, "
            "1 with fewer than 4 cores, otherwise cores minus 1.",
        ),
    ] = 0
    processor_turn_us: Annotated[
        int,
        Meta(
            ge=0,
            le=100_000,
            description="CPU time slice in microseconds. Short slices reduce latency when other programs "
            "use the same cores (Linux 6.12 and newer). 0: system default.",
        ),
    ] = 100
    preset: Annotated[
        Literal["default", "small"],
        Meta(
            description="Preset of limits: small sets caches and queues to about a quarter of the defaults."
        ),
    ] = "default"
    auto_tune: Annotated[
        str,
        Meta(
            description="Derive memory settings from a size in MB; yes uses the memory of the machine or "
            "its control group."
        ),
    ] = ""
    config: Annotated[str, Meta(description="Settings file; by default ./tailrace.toml if it exists.")] = ""
    object_store: Annotated[
        str,
        Meta(
            description="Object store for sealed segments: file:///directory, s3://bucket/prefix, gs://, "
            "az://; empty: objects/ in the data directory."
        ),
    ] = ""
    take_over: Annotated[
        bool,
        Meta(
            description="Take over the object store from another server, which then stops writing; all of "
            "its streams must be in the data directory. Also allows starting with data older "
            "than the object store."
        ),
    ] = False
    bootstrap: Annotated[
        bool,
        Meta(
            description="Restore all data from the object store; requires a data directory without streams."
        ),
    ] = False
    recovery_key: Annotated[
        Secret,
        Meta(
            description="Key of at least 32 bytes that encrypts the webhook keys on the object store; if "
            "empty, they are not stored there."
        ),
    ] = ""
    init: Annotated[
        str,
        Meta(description="TOML file of streams to create at start; existing streams must match it."),
    ] = ""
    public_url: Annotated[
        str,
        Meta(description="Base of the URLs in responses, if clients reach the server under another name."),
    ] = ""
    trusted_proxies: Annotated[
        str,
        Meta(
            description="Addresses and networks of proxies, comma-separated, whose X-Forwarded-For, -Proto "
            "and -Host headers are used; from other peers they are ignored."
        ),
    ] = ""
    insecure: Annotated[
        bool, Meta(description="Allow listening on non-loopback addresses without authentication.")
    ] = False

    tls_cert: Annotated[
        str, Meta(description="PEM file with the certificate chain; enables TLS. Reloaded on SIGHUP.")
    ] = ""
    tls_key: Annotated[str, Meta(description="PEM file with the certificate's private key.")] = ""
    tls_self_signed: Annotated[
        bool,
        Meta(
            description="Create and use a self-signed certificate, for development; clients must be "
            "configured to trust it."
        ),
    ] = False

    auth_jwt_secret: Annotated[
        Secret, Meta(description="Shared secret for HS256 tokens, at least 32 bytes.")
    ] = ""
    auth_jwks_url: Annotated[str, Meta(description="URL of the JSON Web Key Set that verifies tokens.")] = ""
    auth_jwks_file: Annotated[
        str, Meta(description="File with the JSON Web Key Set that verifies tokens.")
    ] = ""
    auth_keys_file: Annotated[
        str,
        Meta(
            description="File of API keys and revoked tokens, created by tailrace key create; if empty, "
            "the server uses identity.json in its data directory."
        ),
    ] = ""
    auth_public_streams: Annotated[
        str,
        Meta(description="Prefixes of streams that can be read without a token, comma-separated."),
    ] = ""
    auth_issuer: Annotated[str, Meta(description="Required iss claim of tokens.")] = ""
    auth_audience: Annotated[str, Meta(description="Required aud claim of tokens.")] = ""

    cors_origins: Annotated[
        str,
        Meta(
            description="Origins that browsers may call from, WebSockets included: * or a comma-separated "
            "list."
        ),
    ] = "*"
    resource_policy: Annotated[
        Literal["cross-origin", "same-site", "same-origin"],
        Meta(description="Cross-Origin-Resource-Policy header of every response."),
    ] = "cross-origin"
    server_timing: Annotated[bool, Meta(description="Add a Server-Timing header to responses.")] = False

    loopback_webhooks: Annotated[
        Literal["auto", "yes", "no"],
        Meta(
            description="Allow webhooks to loopback addresses; auto allows them when the server listens on "
            "loopback only."
        ),
    ] = "auto"
    webhook_keys_since: Annotated[
        str, Meta(description="Webhook keys created before this RFC 3339 timestamp are discarded.")
    ] = ""
    webhook_allow: Annotated[
        str, Meta(description="Hosts with private addresses that webhooks may call, comma-separated.")
    ] = ""

    source_variables: Annotated[
        str,
        Meta(
            description="Environment variables that sources may read connection strings from: patterns "
            "with *, comma-separated."
        ),
    ] = "*_DSN,*_DSN_*"
    source_directories: Annotated[
        str,
        Meta(
            description="Directories with files that sources may read connection strings from, "
            "comma-separated."
        ),
    ] = "/run/secrets"

    watch_partition_patterns: Annotated[
        str,
        Meta(
            description="Number of partitions of new collections by path, comma-separated: "
            "rooms/*/messages=1; * matches one segment, the first match applies."
        ),
    ] = ""
    watch_metrics_partitions: Annotated[
        bool,
        Meta(description="Add a partition label to the metrics of collections."),
    ] = False
    watch_summaries: Annotated[
        bool,
        Meta(
            description="Always write summaries of all subscriptions to `__subs__`, not only while jobs "
            "need them."
        ),
    ] = False

    pipeline: Annotated[
        Literal["auto", "off", "external"],
        Meta(
            description="Where index files are built: auto starts a local pipeline when there is work, "
            "external expects one that runs elsewhere, off builds none."
        ),
    ] = "auto"
    pipeline_master: Annotated[str, Meta(description="Spark master of the local pipeline.")] = "local[*]"
    pipeline_cores: Annotated[
        int, Meta(ge=0, extra={"unit": "count"}, description="CPU cores of the local pipeline; 0 uses all.")
    ] = 0
    pipeline_nice: Annotated[
        int, Meta(ge=0, le=19, description="Niceness of the local pipeline's processes.")
    ] = 10
    pipeline_conf: Annotated[
        str, Meta(description="Additional Spark settings, name=value, comma-separated.")
    ] = ""

    hub_address: Annotated[str, Meta(description="Address of the hub itself.")] = "@(cloudflare/signal-hub)"
    hub_root: Annotated[
        bool, Meta(description="Also serve the hub at / and /ws, for clients with a fixed path.")
    ] = False
    hub_policy: Annotated[
        str, Meta(description="File with the hub's access rules, TOML or JSON; reloaded on SIGHUP.")
    ] = ""
    hub_topics_default: Annotated[
        Literal["allow", "deny"], Meta(description="Access to topics that no rule matches.")
    ] = "allow"
    hub_durable_topics: Annotated[
        str, Meta(description="Topics that are always stored in streams: patterns with *, comma-separated.")
    ] = ""
    hub_signatures: Annotated[
        Literal["optional", "required"], Meta(description="Whether messages of actors must be signed.")
    ] = "optional"
    hub_keys: Annotated[
        str, Meta(description="JSON file with the signing secrets of actors, by address.")
    ] = ""
    hub_trace: Annotated[
        Literal["off", "durable", "all"],
        Meta(description="Which messages are traced in hub/trace: none, durable ones or all."),
    ] = "durable"
    hub_mint_tokens: Annotated[
        bool, Meta(description="Let sessions refresh their tokens at the hub; requires the shared secret.")
    ] = False
    hub_deflate: Annotated[bool, Meta(description="Compress hub messages (permessage-deflate).")] = False

    edge_upstream: Annotated[
        str,
        Meta(
            description="Upstream servers of an edge, comma-separated: http://host:port or "
            "name=http://host:port."
        ),
    ] = ""
    edge_upstream_mode: Annotated[
        Literal["single", "any", "sharded"],
        Meta(
            description="Relation of several upstreams: any are equivalent endpoints of one deployment, "
            "sharded are servers with different streams."
        ),
    ] = "single"
    edge_listen: Annotated[str, Meta(description="Address and port that an edge listens on.")] = (
        "127.0.0.1:4438"
    )
    edge_cache_dir: Annotated[
        str,
        Meta(description="Directory of an edge's disk cache; if empty, slices are cached in memory only."),
    ] = ""
    edge_token_file: Annotated[str, Meta(description="File with the edge's own token, of scope read.")] = ""
    edge_signing_key: Annotated[
        Secret,
        Meta(
            description="Key of at least 32 bytes shared by an edge and its server; the edge signs client "
            "identities with it and the server accepts them."
        ),
    ] = ""
    edge_metrics_port: Annotated[
        Port, Meta(description="Separate port of an edge for /metrics; 0 serves it on the main port.")
    ] = 0
    edge_expose_server: Annotated[
        bool, Meta(description="Let clients of an edge reach /v1/server of its upstream.")
    ] = False

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Lowest severity that is logged."),
    ] = "info"
    log_format: Annotated[
        Literal["auto", "json", "console"],
        Meta(description="Format of log lines; auto is console on a terminal, otherwise json."),
    ] = "auto"
    log_requests: Annotated[
        Literal["off", "failures", "all"],
        Meta(description="Requests that are logged: none, those that fail with a server error, or all."),
    ] = "failures"
    request_ids: Annotated[
        bool,
        Meta(
            description="Add X-Request-Id to every response, not only to errors and to requests that sent "
            "one."
        ),
    ] = False
    metrics_port: Annotated[
        Port, Meta(description="Separate port for /metrics; 0 serves it on the main port.")
    ] = 0

    otlp_traces_stream: Annotated[
        str, Meta(description="Stream for the spans received at /v1/traces; empty disables that route.")
    ] = ""
    otlp_auto_create: Annotated[
        bool, Meta(description="Create the stream for spans, with its profile, when the first spans arrive.")
    ] = False

    traces_url: Annotated[
        str,
        Meta(
            description="Collector that the server sends its own spans to, OTLP over HTTP; empty disables "
            "tracing."
        ),
    ] = ""
    traces_headers: Annotated[
        Secret, Meta(description="Headers for the trace collector, name=value, comma-separated.")
    ] = ""
    traces_one_in: Annotated[
        int,
        Meta(
            ge=0,
            extra={"unit": "count"},
            description="Trace one in this many requests whose caller sends no trace context; 0 traces none.",
        ),
    ] = 100

    limits: Limits = Limits()

    @property
    def object_store_url(self) -> str:
        return self.object_store or (self.data_dir.absolute() / "objects").as_uri()

    @property
    def auth_configured(self) -> bool:
        """Whether requests have to carry a token."""
        return bool(self.auth_jwt_secret or self.auth_jwks_url or self.auth_jwks_file or self.auth_keys_file)

    @property
    def auth_public_prefixes(self) -> tuple[str, ...]:
        """Streams with one of these prefixes can be read without a token."""
        return split_list(self.auth_public_streams)

    @property
    def loopback_only(self) -> bool:
        """Whether only this machine can reach the listener."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def loopback_webhooks_allowed(self) -> bool:
        """Whether webhooks may call loopback addresses."""
        return self.loopback_only if self.loopback_webhooks == "auto" else self.loopback_webhooks == "yes"

    @property
    def webhook_keys_since_ms(self) -> int:
        """Webhook keys created before this time are discarded."""
        if not self.webhook_keys_since:
            return 0
        found = parse_rfc3339_ms(self.webhook_keys_since)
        if found is None:
            raise ValueError("webhook_keys_since must be an RFC 3339 timestamp")
        return found


def parse_networks(text: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    """Comma-separated addresses and networks. Raises ValueError if one is neither."""
    return tuple(ipaddress.ip_network(one, strict=False) for one in split_list(text))


def split_list(text: str) -> tuple[str, ...]:
    """The items of a comma-separated setting."""
    return tuple(one.strip() for one in text.split(",") if one.strip())


class Setting(Struct, frozen=True, kw_only=True):
    """One row of the table, derived from its field."""

    name: str
    kind: Literal["int", "str", "bool", "path", "choice"]
    default: int | str | bool
    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    secret: bool = False
    limit: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()


PRESETS: Final[dict[str, dict[str, int]]] = {
    "default": {},
    "small": {
        "append_queue_stream_bytes": 16 * MIB,
        "append_queue_max_bytes": 64 * MIB,
        "tail_memory_max_bytes": 64 * MIB,
        "block_cache_bytes": 16 * MIB,
        "streams_loaded": 12_500,
        "seal_bytes": 4 * MIB,
        "seal_entries": 1000,
        "spool_bytes": 2048 * MIB,
        "segment_cache_max_bytes": 256 * MIB,
    },
}


def _setting_of_field(field: msgspec.structs.FieldInfo, *, limit: bool) -> Setting:
    base, *metas = get_args(field.type)
    described = {"help": "", "unit": "", "secret": False}
    for meta in cast("list[Meta]", metas):
        described["help"] = meta.description or described["help"]
        described.update(meta.extra or {})
    choices = tuple(cast("tuple[str, ...]", get_args(base))) if get_origin(base) is Literal else ()
    kinds: dict[Any, Any] = {int: "int", str: "str", bool: "bool", Path: "path"}
    default = str(field.default) if base is Path else field.default
    kind = "choice" if choices else kinds[base]
    return Setting(
        name=field.name, kind=kind, default=default, choices=choices, limit=limit, **cast("Any", described)
    )


def _build_table() -> dict[str, Setting]:
    own = [
        _setting_of_field(field, limit=False)
        for field in msgspec.structs.fields(Settings)
        if field.name != "limits"
    ]
    bounds = [_setting_of_field(field, limit=True) for field in msgspec.structs.fields(Limits)]
    table = {setting.name: setting for setting in own + bounds}
    assert len(table) == len(own) + len(bounds), "a setting and a limit share a name"
    return table


SETTINGS_TABLE: Final[dict[str, Setting]] = _build_table()

_QUANTITY: Final = re.compile(r"(\d[\d_]*)\s*([A-Za-z]*)")
_FACTORS: Final[dict[str, dict[str, int]]] = {
    "bytes": {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30},
    "ms": {"": 1, "ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000},
}
_BOOLS: Final = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def parse_setting(setting: Setting, text: str) -> int | str | bool:
    """Convert text (``64MiB``, ``30s``, ``yes``) to the setting's value."""
    if setting.kind == "bool":
        if (value := _BOOLS.get(text.strip().lower())) is None:
            raise SettingsError(f"{text!r} is not yes or no")
        return value
    if setting.kind != "int":
        return text
    match = _QUANTITY.fullmatch(text.strip())
    factors = _FACTORS.get(setting.unit, {"": 1})
    factor = factors.get(match[2].lower()) if match else None
    if match is None or factor is None:
        units = ", ".join(unit for unit in factors if unit)
        raise SettingsError(f"{text!r} is not a whole number" + (f" (units: {units})" if units else ""))
    return int(match[1]) * factor


def describe_settings(settings: Settings) -> list[dict[str, object]]:
    """Every setting with its value, for ``/v1/server/_details``, without secrets."""
    rows: list[dict[str, object]] = []
    for setting in SETTINGS_TABLE.values():
        raw = getattr(settings.limits if setting.limit else settings, setting.name)
        value: object = str(raw) if isinstance(raw, Path) else raw
        row: dict[str, object] = {"name": setting.name, "value": value, "default": setting.default}
        if setting.secret:
            row["value"] = "(set)" if value else ""
        if setting.unit:
            row["unit"] = setting.unit
        rows.append(row)
    return rows
