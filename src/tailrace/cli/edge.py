"""``tailrace edge``: its flags are the settings of an edge."""

from __future__ import annotations

import inspect

from cyclopts import App, Group

from tailrace.cli.serve import parameter_of
from tailrace.common.settings import SETTINGS_TABLE, Setting
from tailrace.common.settings_loading import load_settings

_HELP = """Start an edge, which serves the clients of a server, until SIGTERM or Ctrl-C.

All live readers of a stream share one connection to the upstream server, and immutable responses are
cached. Clients use the same routes as on the server.

For example:

    tailrace edge --upstream http://127.0.0.1:4437

    tailrace edge --upstream https://streams.example --listen 0.0.0.0:4438 --cache-dir /var/cache/tailrace

The flags are the settings that begin with `edge_`, without this prefix, and those shared with a server. Every
flag may also be given as a variable (`--upstream` is `TAILRACE_EDGE_UPSTREAM`) or in `tailrace.toml`
(`edge_upstream`). Give an edge the same `TAILRACE_AUTH_*` settings as its server: it checks
tokens itself.
"""

PREFIX = "edge_"
# Settings shared with a server.
COMMON = (
    "config",
    "insecure",
    "tls_cert",
    "tls_key",
    "auth_jwt_secret",
    "auth_jwks_url",
    "auth_jwks_file",
    "auth_keys_file",
    "auth_public_streams",
    "auth_issuer",
    "auth_audience",
    "cors_origins",
    "resource_policy",
    "server_timing",
    "log_level",
    "log_format",
    "log_requests",
    "request_ids",
    "append_body_bytes",
    "name_bytes",
    "long_poll_default_ms",
    "long_poll_max_ms",
    "sse_rotation_ms",
    "sse_keep_alive_ms",
    "live_unsent_bytes",
)


def _edge(**flags: str | bool | None) -> int:
    settings = load_settings({name: value for name, value in flags.items() if value is not None})
    from tailrace.edge.process import run

    return run(settings)


def _flag(setting: Setting) -> str:
    return "--" + setting.name.removeprefix(PREFIX).replace("_", "-")


def _build() -> App:
    settings, limits = Group("Settings", sort_key=1), Group("Limits", sort_key=2)
    rows = [row for row in SETTINGS_TABLE.values() if row.name.startswith(PREFIX) or row.name in COMMON]
    parameters = [parameter_of(row, limits if row.limit else settings, _flag(row)) for row in rows]
    # cyclopts reads the signature of a function, so the table is converted to one.
    _edge.__signature__ = inspect.Signature(parameters)
    _edge.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = App(name="edge", help=_HELP, help_format="markdown", result_action="return_value")
    app.default(_edge)
    return app


command = _build()
