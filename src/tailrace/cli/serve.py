"""``tailrace serve``: its flags are the settings table."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from cyclopts import App, Group, Parameter

from tailrace.common.settings import SETTINGS_TABLE, Setting
from tailrace.common.settings_loading import load_settings

_HELP = """Start a server and run it until SIGTERM or Ctrl-C, which finish requests in progress first.

Without flags it listens on http://127.0.0.1:4437 and stores its data in ./tailrace-data.

For example:

    tailrace serve

    tailrace serve --port 5000 --data-dir /var/lib/tailrace

    tailrace serve --workers 2

    TAILRACE_AUTH_JWT_SECRET=... tailrace serve --host 0.0.0.0

Every flag may also be given as a variable (`--data-dir` is `TAILRACE_DATA_DIR`) or in `tailrace.toml`
(`data_dir`). A flag overrides a variable, a variable the file. Sizes and times have units (`64MiB`,
`30s`). Give secrets as variables: flags can be read in the process list.

`--help` shows the settings that most servers need, `--help-all` every setting and limit.
"""

# Shown by `--help`; the others are rarely changed.
ESSENTIAL = (
    "host",
    "port",
    "data_dir",
    "config",
    "preset",
    "workers",
    "memory_limit_bytes",
    "object_store",
    "insecure",
    "tls_cert",
    "tls_key",
    "tls_self_signed",
    "auth_jwt_secret",
    "auth_jwks_url",
    "auth_keys_file",
    "cors_origins",
    "pipeline",
    "log_level",
    "log_format",
    "metrics_port",
)


def _serve(flags: Mapping[str, str | bool | None]) -> int:
    settings = load_settings({name: value for name, value in flags.items() if value is not None})
    from tailrace.auth import check_listen_address

    check_listen_address(settings)
    from tailrace.cluster.layout import LAYOUT_FILE, choose_worker_count

    settings = msgspec.structs.replace(settings, workers=choose_worker_count(settings))
    if settings.workers > 1 or (settings.data_dir / LAYOUT_FILE).exists():
        from tailrace.cluster.supervisor import run
    else:
        from tailrace.server.process import run
    return run(settings)


def parameter_of(setting: Setting, group: Group, flag: str) -> inspect.Parameter:
    """A setting as a parameter of a command."""
    default = str(setting.default).lower() if setting.kind == "bool" else str(setting.default)
    text = setting.help + (f" [default: {default}{_unit(setting)}]" if default else "")
    if setting.choices:
        text += f" [one of: {', '.join(setting.choices)}]"
    declared = Parameter(name=flag, help=text, group=group, show_default=False, negative="")
    kind: Any = bool | None if setting.kind == "bool" else str | None
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, declared]
    )


def _unit(setting: Setting) -> str:
    return f" {setting.unit}" if setting.unit in {"bytes", "ms"} else ""


def command_for(arguments: Sequence[str]) -> App:
    """A command with only the flags in `arguments`: declaring all takes longer than opening a log.

    `--help` shows the essential ones. `--help-all`, and a name that is not a flag, get all of them.
    """
    named = {word.partition("=")[0] for word in arguments if word.startswith("-")}
    if named & {"--help", "-h"}:
        return _declared(SETTINGS_TABLE[name] for name in ESSENTIAL)
    rows = [row for row in SETTINGS_TABLE.values() if row.flag in named]
    return _declared(rows) if len(rows) == len(named) else command


def _declared(rows: Iterable[Setting]) -> App:
    def serve(**flags: str | bool | None) -> int:
        return _serve(flags)

    settings, limits = Group("Settings", sort_key=1), Group("Limits", sort_key=2)
    parameters = [parameter_of(row, limits if row.limit else settings, row.flag) for row in rows]
    # cyclopts reads the signature of a function, so the table is converted to one.
    serve.__signature__ = inspect.Signature(parameters)
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = App(
        name="serve",
        help=_HELP,
        help_flags=("--help", "-h", "--help-all"),
        help_format="markdown",
        result_action="return_value",
    )
    app.default(serve)
    return app


command = _declared(SETTINGS_TABLE.values())
