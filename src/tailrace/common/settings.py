"""The one table of settings.

A setting is a field of :class:`Settings` or of :class:`~tailrace.common.limits.Limits`. Its flag
(``--data-dir``), its variable (``TAILRACE_DATA_DIR``), its key in ``tailrace.toml`` (``data_dir``) and its
line in the documentation all follow from that field. How they are put together is in `settings_loading.py`.
"""

from __future__ import annotations

import ipaddress
import re
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from tailrace.common.limits import MIB, Limits

ENV_PREFIX: Final = "TAILRACE_"
PORT_DEFAULT: Final = 4437

Port = Annotated[int, Meta(ge=0, le=65535)]
Secret = Annotated[str, Meta(extra={"secret": True})]


class SettingsError(ValueError):
    """A setting that cannot be used; the message names it and where it came from."""


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one server is set up. Build it with :func:`load`, or directly in tests."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Port to listen on; 0 takes any free one.")] = PORT_DEFAULT
    data_dir: Annotated[Path, Meta(description="Directory of the journal and the hot store.")] = Path(
        "./tailrace-data"
    )
    workers: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            extra={"unit": "count"},
            description="Processes that share the streams; limits hold for each. Another number than before "
            "moves streams at start. 0: the number as it is; in a new data directory one below four cores, "
            "else one less than there are.",
        ),
    ] = 0
    processor_turn_us: Annotated[
        int,
        Meta(
            ge=0,
            le=100_000,
            description="How long a turn of the processor is to be, in microseconds: with short ones the "
            "server is let in sooner where others compute (Linux 6.12 and newer). 0: as the system does.",
        ),
    ] = 100
    preset: Annotated[
        Literal["default", "small"],
        Meta(description="A set of limits: small keeps caches and queues at a quarter."),
    ] = "default"
    auto_tune: Annotated[
        str,
        Meta(
            description="Choose memory settings that fit a size in MB; yes takes what the machine or its "
            "control group has."
        ),
    ] = ""
    config: Annotated[str, Meta(description="Settings file; ./tailrace.toml is used when it exists.")] = ""
    object_store: Annotated[
        str,
        Meta(
            description="Where sealed history goes: file:///directory, s3://bucket/prefix, gs://, az://; "
            "empty is objects/ in the data directory."
        ),
    ] = ""
    take_over: Annotated[
        bool,
        Meta(
            description="Take the object store over from another server, which then stops writing; all its "
            "streams must be in the data directory. Also starts a server that is older than its object store."
        ),
    ] = False
    bootstrap: Annotated[
        bool,
        Meta(description="Restore everything from the object store; needs a data directory without streams."),
    ] = False
    recovery_key: Annotated[
        Secret,
        Meta(
            description="Encrypts the webhook keys on the object store, 32 bytes or more; without it they "
            "are not kept there."
        ),
    ] = ""
    init: Annotated[
        str,
        Meta(description="TOML file with streams that are made at start; those that exist must be like it."),
    ] = ""
    public_url: Annotated[
        str, Meta(description="Base of the URLs the server writes, if it is reached under another name.")
    ] = ""
    trusted_proxies: Annotated[
        str,
        Meta(
            description="Addresses and networks of proxies, comma-separated, whose X-Forwarded-For, -Proto "
            "and -Host are believed; of all others they are not looked at."
        ),
    ] = ""
    insecure: Annotated[bool, Meta(description="Allow listening beyond loopback without authentication.")] = (
        False
    )

    tls_cert: Annotated[
        str, Meta(description="PEM file with the certificate chain; turns TLS on. Read again on SIGHUP.")
    ] = ""
    tls_key: Annotated[str, Meta(description="PEM file with the certificate's private key.")] = ""
    tls_self_signed: Annotated[
        bool,
        Meta(
            description="Make a certificate for this machine and use it, for development; clients have to be "
            "told to trust it."
        ),
    ] = False

    auth_jwt_secret: Annotated[
        Secret, Meta(description="Shared secret of HS256 tokens, 32 bytes or more.")
    ] = ""
    auth_jwks_url: Annotated[str, Meta(description="URL of the keys that tokens are checked with.")] = ""
    auth_jwks_file: Annotated[str, Meta(description="File of the keys that tokens are checked with.")] = ""
    auth_keys_file: Annotated[
        str,
        Meta(
            description="File of API keys and revoked tokens, made by tailrace key create; without it the "
            "server keeps its own, identity.json in the data directory."
        ),
    ] = ""
    auth_public_streams: Annotated[
        str,
        Meta(description="Prefixes of streams that everybody may read without a token, comma-separated."),
    ] = ""
    auth_issuer: Annotated[str, Meta(description="Required iss claim of tokens.")] = ""
    auth_audience: Annotated[str, Meta(description="Required aud claim of tokens.")] = ""

    cors_origins: Annotated[
        str,
        Meta(description="Origins browsers may call from, WebSockets included: * or a comma-separated list."),
    ] = "*"
    resource_policy: Annotated[
        Literal["cross-origin", "same-site", "same-origin"],
        Meta(description="Cross-Origin-Resource-Policy of every answer."),
    ] = "cross-origin"
    server_timing: Annotated[bool, Meta(description="Add a Server-Timing header to answers.")] = False

    loopback_webhooks: Annotated[
        Literal["auto", "yes", "no"],
        Meta(description="Allow webhooks to this machine; auto allows them when listening on loopback only."),
    ] = "auto"
    webhook_keys_since: Annotated[
        str, Meta(description="Instant (RFC 3339) before which no webhook key may have been made.")
    ] = ""
    webhook_allow: Annotated[
        str, Meta(description="Hosts webhooks may call although their address is private, comma-separated.")
    ] = ""

    source_variables: Annotated[
        str,
        Meta(
            description="Variables of the environment that sources may take connection strings from: "
            "patterns with *, comma-separated."
        ),
    ] = "*_DSN,*_DSN_*"
    source_directories: Annotated[
        str,
        Meta(description="Directories of files that sources may take connection strings from, by comma."),
    ] = "/run/secrets"

    watch_partition_patterns: Annotated[
        str,
        Meta(
            description="Partitions of new collections by their path, comma-separated: rooms/*/messages=1; * "
            "is one segment, the first that fits counts."
        ),
    ] = ""
    watch_metrics_partitions: Annotated[
        bool,
        Meta(description="Label the metrics of a collection with the partition, where they have one."),
    ] = False
    watch_summaries: Annotated[
        bool,
        Meta(description="Write summaries of all subscriptions to `__subs__` always, not only for jobs."),
    ] = False

    pipeline: Annotated[
        Literal["auto", "off", "external"],
        Meta(
            description="Who builds companions: auto starts a local pipeline when there is work, external "
            "is one that is run elsewhere, off nobody."
        ),
    ] = "auto"
    pipeline_master: Annotated[str, Meta(description="Spark master of the local pipeline.")] = "local[*]"
    pipeline_cores: Annotated[
        int, Meta(ge=0, extra={"unit": "count"}, description="Cores of the local pipeline; 0 is all of them.")
    ] = 0
    pipeline_nice: Annotated[
        int, Meta(ge=0, le=19, description="Niceness of the local pipeline: how far it steps back.")
    ] = 10
    pipeline_conf: Annotated[str, Meta(description="More settings for Spark, name=value, by comma.")] = ""

    hub_address: Annotated[str, Meta(description="Address of the hub itself.")] = "@(cloudflare/signal-hub)"
    hub_root: Annotated[
        bool, Meta(description="Serve the hub at / and /ws too, for clients that know no other path.")
    ] = False
    hub_policy: Annotated[
        str, Meta(description="File with the rules of the hub, TOML or JSON; read again on SIGHUP.")
    ] = ""
    hub_topics_default: Annotated[
        Literal["allow", "deny"], Meta(description="What holds for topics without a rule.")
    ] = "allow"
    hub_durable_topics: Annotated[
        str, Meta(description="Topics that are always kept in streams: patterns with *, comma-separated.")
    ] = ""
    hub_signatures: Annotated[
        Literal["optional", "required"], Meta(description="Whether messages of actors have to be signed.")
    ] = "optional"
    hub_keys: Annotated[
        str, Meta(description="JSON file with the secrets that actors sign with, by address.")
    ] = ""
    hub_trace: Annotated[
        Literal["off", "durable", "all"],
        Meta(description="Which messages leave their steps in hub/trace: none, those that are kept, or all."),
    ] = "durable"
    hub_mint_tokens: Annotated[
        bool, Meta(description="Let sessions refresh their tokens here; needs the shared secret.")
    ] = False
    hub_deflate: Annotated[bool, Meta(description="Compress messages of the hub.")] = False

    edge_upstream: Annotated[
        str,
        Meta(
            description="Servers behind an edge, comma-separated: http://host:port or name=http://host:port."
        ),
    ] = ""
    edge_upstream_mode: Annotated[
        Literal["single", "any", "sharded"],
        Meta(
            description="What several upstreams are: any is doors to one deployment, sharded is servers with "
            "streams of their own."
        ),
    ] = "single"
    edge_listen: Annotated[str, Meta(description="Address and port of an edge.")] = "127.0.0.1:4438"
    edge_cache_dir: Annotated[
        str, Meta(description="Directory in which an edge keeps slices; without it memory only.")
    ] = ""
    edge_token_file: Annotated[
        str, Meta(description="File with the token that an edge uses on its own account, of scope read.")
    ] = ""
    edge_signing_key: Annotated[
        Secret,
        Meta(
            description="Key of 32 bytes or more that an edge and its server share: the edge says with it "
            "for whom it asks, and the server believes it."
        ),
    ] = ""
    edge_metrics_port: Annotated[
        Port, Meta(description="Listener of an edge of its own for /metrics; 0 serves it on the main one.")
    ] = 0
    edge_expose_server: Annotated[
        bool, Meta(description="Let clients of an edge reach /v1/server of the server behind it.")
    ] = False

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Least severe log line that is written."),
    ] = "info"
    log_format: Annotated[
        Literal["auto", "json", "console"],
        Meta(description="Form of log lines; auto is console on a terminal."),
    ] = "auto"
    log_requests: Annotated[
        Literal["off", "failures", "all"],
        Meta(description="Requests that get a line in the log: none, those that fail by our fault, or all."),
    ] = "failures"
    request_ids: Annotated[
        bool,
        Meta(
            description="Give every answer an X-Request-Id, not only refusals and answers to requests that "
            "have one."
        ),
    ] = False
    metrics_port: Annotated[
        Port, Meta(description="Listener of its own for /metrics; 0 serves it on the main one.")
    ] = 0

    otlp_traces_stream: Annotated[
        str, Meta(description="Stream that spans sent to /v1/traces go to; empty takes none.")
    ] = ""
    otlp_auto_create: Annotated[
        bool, Meta(description="Make the stream for spans, with its profile, when the first ones come.")
    ] = False

    traces_url: Annotated[
        str, Meta(description="Collector that spans are sent to, OTLP over HTTP; empty traces nothing.")
    ] = ""
    traces_headers: Annotated[
        Secret, Meta(description="Headers for the collector, name=value, comma-separated.")
    ] = ""
    traces_one_in: Annotated[
        int,
        Meta(
            ge=0,
            extra={"unit": "count"},
            description="Of requests whose caller does not trace, one in so many is traced; 0 traces none.",
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
        """Streams that begin with one of these are read without a token."""
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
        """Whether webhooks may call this machine."""
        return self.loopback_only if self.loopback_webhooks == "auto" else self.loopback_webhooks == "yes"

    @property
    def webhook_keys_since_ms(self) -> int:
        """Webhook keys older than this are given up."""
        if not self.webhook_keys_since:
            return 0
        moment = datetime.fromisoformat(self.webhook_keys_since)
        if moment.tzinfo is None:
            raise ValueError("an instant has a time zone")
        return int(moment.timestamp() * 1000)


def parse_networks(text: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    """Addresses and networks, separated by commas. ValueError if one of them is neither."""
    return tuple(ipaddress.ip_network(one, strict=False) for one in split_list(text))


def split_list(text: str) -> tuple[str, ...]:
    """What a setting names, separated by commas."""
    return tuple(one.strip() for one in text.split(",") if one.strip())


class Setting(Struct, frozen=True, kw_only=True):
    """One row of the table, read off its field."""

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
    """Turn what a person wrote (``64MiB``, ``30s``, ``yes``) into the setting's value."""
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
    """Every setting with its value, for ``/v1/server/_details``. Secrets stay hidden."""
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
