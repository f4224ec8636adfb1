"""Configuration of a source, and the policy for the secrets it may use.

A source maps tables to collections; a table is one of PostgreSQL, a collection of MongoDB, or a type of a
stream. Secrets are referenced by name: a connection string is in an environment variable of the server or in
a file, and responses and stored configuration contain only that name. `SecretPolicy` restricts which
variables and files may be used, since database managers need not be operators of the machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.schema.json_values import invalid_request
from tailrace.watch import names
from tailrace.watch.sources.model import SourceError

TABLES_MAX: Final = 256
KEY_COLUMNS_MAX: Final = 32
SECRET_BYTES: Final = 64 * 1024
BATCH_CHANGES: Final = 1000
BATCH_CHANGES_MAX: Final = 100_000
BATCH_BYTES: Final = 4 * 1024 * 1024
BATCH_BYTES_MAX: Final = 16 * 1024 * 1024
EVENTS_PER_S: Final = 50_000
BYTES_PER_S: Final = 64 * 1024 * 1024
RATE_MAX: Final = 2**40

_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,62}\Z")
_SLOT: Final = re.compile(r"[a-z0-9_]{1,63}\Z")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
_MEMBERS_BY_KIND: Final = {
    "postgres": frozenset({"dsn", "publication", "slot", "initial", "numeric"}),
    "mongo": frozenset({"dsn", "initial"}),
    "stream": frozenset({"stream"}),
}
_COMMON_MEMBERS: Final = frozenset({"name", "kind", "collections", "batch", "limits", "onGap"})
_MEMBERS: Final = _COMMON_MEMBERS.union(*_MEMBERS_BY_KIND.values())


class SecretRef(msgspec.Struct, frozen=True):
    """A reference to a secret."""

    env: str | None = None
    file: str | None = None

    def read(self) -> str:
        if self.env is not None:
            found = os.environ.get(self.env)
            if not found:
                raise SourceError(f"the server's environment has no {self.env}")
            return found
        try:
            with Path(self.file or "").open("rb") as opened:
                return opened.read(SECRET_BYTES).decode().strip()
        except (OSError, ValueError) as error:
            raise SourceError(f"cannot read the file of the connection string: {error}") from None

    def to_json(self) -> dict[str, str]:
        return {"env": self.env} if self.env is not None else {"file": self.file or ""}


class TableMapping(msgspec.Struct, frozen=True):
    """A table and its collection."""

    table: str
    collection: str
    key: tuple[str, ...] = ()  # empty: the primary key
    partitions: int | None = None

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"collection": self.collection}
        if self.key:
            found["key"] = list(self.key)
        if self.partitions is not None:
            found["partitions"] = self.partitions
        return found


class SourceConfig(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: str
    dsn: SecretRef | None
    publication: str
    slot: str
    stream: str
    tables: tuple[TableMapping, ...]
    batch_changes: int
    batch_bytes: int
    events_per_s: int
    bytes_per_s: int
    on_gap: str
    initial: str
    numeric: str

    def value(self) -> dict[str, Any]:
        """The configuration as JSON with defaults, readable by `read_source_config`."""
        where: dict[str, Any] = {
            "dsn": None if self.dsn is None else self.dsn.to_json(),
            "publication": self.publication,
            "slot": self.slot,
            "initial": self.initial,
            "numeric": self.numeric,
            "stream": self.stream,
        }
        return {
            "name": self.name,
            "kind": self.kind,
            **{name: value for name, value in where.items() if name in _MEMBERS_BY_KIND[self.kind]},
            "collections": {one.table: one.to_json() for one in self.tables},
            "batch": {"maxChanges": self.batch_changes, "maxBytes": self.batch_bytes},
            "limits": {"eventsPerSecond": self.events_per_s, "bytesPerSecond": self.bytes_per_s},
            "onGap": self.on_gap,
        }

    def identity(self) -> tuple[object, ...]:
        """What cannot change without a new load."""
        return self.kind, self.publication, self.slot, self.stream, self.tables, self.numeric


def check_source_name(name: str) -> str:
    if not _NAME.match(name):
        raise invalid_request("the name of a source must be a letter a-z and up to 62 of a-z, 0-9, '_', '-'")
    return name


def read_source_config(database: str, name: str, value: dict[str, Any]) -> SourceConfig:
    """Parse and validate a configuration; missing members get defaults."""
    if unknown := sorted(set(value) - _MEMBERS):
        raise invalid_request(f"unknown member {unknown[0]!r}")
    if value.get("name", name) != name:
        raise invalid_request("name must equal the name in the path")
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in _MEMBERS_BY_KIND:
        raise invalid_request("kind must be postgres, mongo or stream")
    if unknown := sorted(set(value) - _COMMON_MEMBERS - _MEMBERS_BY_KIND[kind]):
        raise invalid_request(f"a source of kind {kind} must not have {unknown[0]}")
    slot = value.get("slot", _default_slot(database, name))
    if not isinstance(slot, str) or not _SLOT.match(slot):
        raise invalid_request("slot must be 1 to 63 of a-z, 0-9 and '_'")
    publication = value.get("publication", "tailrace")
    if not isinstance(publication, str) or not 1 <= len(publication.encode()) <= 63 or "\0" in publication:
        raise invalid_request("publication must be a name of 1 to 63 bytes")
    batch = _read_object(value, "batch", {"maxChanges", "maxBytes"})
    limits = _read_object(value, "limits", {"eventsPerSecond", "bytesPerSecond"})
    return SourceConfig(
        name=name,
        kind=kind,
        dsn=None if kind == "stream" else _read_secret(value.get("dsn")),
        publication=publication,
        slot=slot,
        stream=_read_stream(value.get("stream")) if kind == "stream" else "",
        tables=_read_tables(value.get("collections"), kind),
        batch_changes=_read_number(batch, "maxChanges", BATCH_CHANGES, BATCH_CHANGES_MAX),
        batch_bytes=_read_number(batch, "maxBytes", BATCH_BYTES, BATCH_BYTES_MAX),
        events_per_s=_read_number(limits, "eventsPerSecond", EVENTS_PER_S, RATE_MAX),
        bytes_per_s=_read_number(limits, "bytesPerSecond", BYTES_PER_S, RATE_MAX),
        on_gap=_read_choice(value, "onGap", ("rescan", "hold")),
        initial=_read_choice(value, "initial", ("load", "now")),
        numeric=_read_choice(value, "numeric", ("string", "double")),
    )


def _default_slot(database: str, name: str) -> str:
    return f"tailrace_{database}_{name}".replace("-", "_")[:63]


def _read_secret(value: object) -> SecretRef:
    wrong = invalid_request(
        'dsn names where the connection string is: {"env": "PG_DSN"} or {"file": "/path"}'
    )
    if not isinstance(value, dict) or len(cast("dict[str, Any]", value)) != 1:
        raise wrong
    found = cast("dict[str, Any]", value)
    env, file = found.get("env"), found.get("file")
    if isinstance(env, str) and _VARIABLE.match(env):
        return SecretRef(env=env)
    if isinstance(file, str) and file.startswith("/") and "\0" not in file and len(file) <= 4096:
        return SecretRef(file=file)
    raise wrong


def _read_stream(value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value.encode()) <= 1024 or value.startswith("__"):
        raise invalid_request("stream must be the name of a stream of this server")
    return value


def _read_tables(value: object, kind: str) -> tuple[TableMapping, ...]:
    if not isinstance(value, dict) or not value:
        raise invalid_request('collections is {"schema.table": {"collection": "...", "key": ["..."]}, ...}')
    items = cast("dict[str, Any]", value)
    if len(items) > TABLES_MAX:
        raise invalid_request(f"a source may have at most {TABLES_MAX} collections")
    found = tuple(_table_mapping(table, item, kind) for table, item in items.items())
    if len({one.collection for one in found}) != len(found):
        raise invalid_request("tables must have different collections")
    return found


def _table_mapping(table: str, value: Any, kind: str) -> TableMapping:
    schema, dot, name = table.partition(".")
    if len(table) > 200 or "\0" in table or (kind != "stream" and not (dot and schema and name)):
        form = "database.collection" if kind == "mongo" else "schema.table"
        raise invalid_request(f"{table[:80]!r} must have the form {form}")
    known = {"collection", "key", "partitions"} if kind == "postgres" else {"collection", "partitions"}
    if not isinstance(value, dict) or not set(cast("dict[str, Any]", value)) <= known:
        raise invalid_request(f"{table}: must be an object of {', '.join(sorted(known))}")
    item = cast("dict[str, Any]", value)
    collection, key, partitions = item.get("collection"), item.get("key", []), item.get("partitions")
    if not isinstance(collection, str):
        raise invalid_request(f"{table}: collection must be the name of a collection")
    columns: list[Any] = cast("list[Any]", key) if isinstance(key, list) else [None]
    if len(columns) > KEY_COLUMNS_MAX or not all(isinstance(one, str) and one for one in columns):
        raise invalid_request(f"{table}: key must be a list of columns")
    if len(set(columns)) != len(columns):
        raise invalid_request(f"{table}: key names a column twice")
    if partitions is not None and (
        type(partitions) is not int or not 1 <= partitions <= names.PARTITIONS_MAX
    ):
        raise invalid_request(f"{table}: partitions must be 1 to {names.PARTITIONS_MAX}")
    return TableMapping(table, names.check_collection(collection), tuple(columns), partitions)


def _read_object(value: dict[str, Any], name: str, known: set[str]) -> dict[str, Any]:
    found = value.get(name, {})
    if not isinstance(found, dict) or not set(cast("dict[str, Any]", found)) <= known:
        raise invalid_request(f"{name} must be an object of {' and '.join(sorted(known))}")
    return cast("dict[str, Any]", found)


def _read_number(value: dict[str, Any], name: str, default: int, most: int) -> int:
    found = value.get(name, default)
    if type(found) is not int or not 1 <= found <= most:
        raise invalid_request(f"{name} must be 1 to {most}")
    return found


def _read_choice(value: dict[str, Any], name: str, choices: tuple[str, ...]) -> str:
    found = value.get(name, choices[0])
    if found not in choices:
        raise invalid_request(f"{name} must be {' or '.join(choices)}")
    return found


# Variables of the server and its object store: usable only with a pattern that starts with one of these.
_RESERVED_VARIABLES: Final = ("TAILRACE_", "AWS_", "AZURE_", "GOOGLE_")


class SecretPolicy:
    """The variables and directories that the operator allows sources to use."""

    def __init__(self, variables: Sequence[str], directories: Sequence[str]) -> None:
        self._variables = variables
        self._directories = directories

    def check(self, secret: SecretRef | None) -> None:
        if secret is None:
            return
        if secret.env is not None and not self._may_use_variable(secret.env):
            raise TailraceError(
                "forbidden", f"sources may not use the variable {secret.env} (setting source_variables)"
            )
        if secret.file is not None and not self._may_use_file(secret.file):
            raise TailraceError(
                "forbidden", "sources may not use files outside the setting source_directories"
            )

    def _may_use_variable(self, name: str) -> bool:
        reserved = next((prefix for prefix in _RESERVED_VARIABLES if name.startswith(prefix)), "")
        return any(fnmatchcase(name, pattern) and pattern.startswith(reserved) for pattern in self._variables)

    def _may_use_file(self, file: str) -> bool:
        """Symbolic links are resolved first."""
        index = Path(os.path.realpath(file))
        return any(index.is_relative_to(os.path.realpath(directory)) for directory in self._directories)
