"""Write the pages of docs/ that are made from tables in the code; with --check, only say which are stale."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from tailrace.auth import Action
from tailrace.cli.app import VERBS
from tailrace.cli.errors import EXIT_CODES
from tailrace.common.errors import ERROR_CATALOGUE
from tailrace.common.metrics import MetricDefinition
from tailrace.common.server_metrics import SERVER_METRICS as METRICS
from tailrace.common.settings import PRESETS, SETTINGS_TABLE, Setting
from tailrace.edge.metrics import TABLE as EDGE_METRICS
from tailrace.server.routes import ROUTES

DOCS = Path(__file__).resolve().parent.parent / "docs"

SETTINGS_INTRO = """\
# Settings

*Made from `settings.py` and `limits.py` by `make docs`.*

Every setting has one name and may be given in several places. Later ones win:

1. the default, or the preset's value (`--preset small`);
2. the settings file: `tailrace.toml` in the current directory, or the one named by `--config`;
3. a variable: `TAILRACE_` and the name in upper case;
4. a flag of `tailrace serve`: the name with hyphens.

```toml
# tailrace.toml
data_dir = "/var/lib/tailrace"
append_body_bytes = "16MiB"
idle_ms = "2m"
```

Sizes take `B`, `KB`, `MB`, `GB`, `KiB`, `MiB`, `GiB` and are bytes without a unit. Times take `ms`, `s`, `m`,
`h`, `d` and are milliseconds without one. Yes-or-no settings take `true`, `false`, `yes`, `no`, `on`, `off`,
`1`, `0`. A value that cannot be used stops the server at start and is named together with where it came from.

A flag can be read by every user of the machine in the process list: give secrets as variables or in the file.
"""


def _quantity(value: object, unit: str) -> str:
    """10485760 bytes as 10 MiB, 30000 ms as 30 s: what a person would write."""
    steps = {
        "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")),
        "ms": ((86_400_000, "d"), (1000, "s")),
    }
    for size, name in steps.get(unit, ()):
        if isinstance(value, int) and value >= size and value % size == 0:
            return f"{value // size} {name}"
    return f"{value} {unit}" if unit in steps else f"{value}"


def _default(setting: Setting) -> str:
    if setting.kind == "bool":
        return "no" if not setting.default else "yes"
    if setting.default == "":
        return "none"
    shown = _quantity(setting.default, setting.unit)
    return shown if setting.kind == "int" else f"`{shown}`"


def _rows(rows: list[Setting]) -> str:
    lines = ["| setting | flag | variable | default | meaning |", "|---|---|---|---|---|"]
    for row in rows:
        choices = f" One of {', '.join(f'`{choice}`' for choice in row.choices)}." if row.choices else ""
        lines.append(f"| `{row.name}` | `{row.flag}` | `{row.env}` | {_default(row)} | {row.help}{choices} |")
    return "\n".join(lines) + "\n"


def _small() -> str:
    lines = ["| limit | default | small |", "|---|---|---|"]
    for name, value in PRESETS["small"].items():
        row = SETTINGS_TABLE[name]
        lines.append(f"| `{name}` | {_quantity(row.default, row.unit)} | {_quantity(value, row.unit)} |")
    return "\n".join(lines) + "\n"


def settings_page() -> str:
    own = [row for row in SETTINGS_TABLE.values() if not row.limit]
    limits = [row for row in SETTINGS_TABLE.values() if row.limit]
    return "\n".join(
        (
            SETTINGS_INTRO,
            "## Server\n",
            _rows(own),
            "## Limits\n",
            _rows(limits),
            "## Preset `small`\n",
            _small(),
        )
    )


METRICS_INTRO = """\
# Metrics

*Made from `telemetry.py` by `make docs`.*

`GET /metrics` answers in Prometheus' text format. With authentication it needs the scope `manage`; give it a
listener of its own with `--metrics-port` to scrape it without a token. Beside the rows below there are the
usual numbers of the process: `process_resident_memory_bytes`, `process_cpu_seconds_total`, `process_open_fds`
and more.

What to look at first: `tailrace_ready` (1 or somebody should be woken), `tailrace_sync_seconds` (the disk),
`tailrace_append_queue_bytes` (the disk cannot keep up), `tailrace_refused_total` (what clients are told), and
`tailrace_disk_free_bytes` (appends stop at `disk_reserve_bytes`).
"""


METRICS_EDGE = """
## Edge

`GET /metrics` of an [edge](edge.md) has rows of its own, and the numbers of its process.

"""


def _metric_rows(table: dict[str, MetricDefinition]) -> str:
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in table.values():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.exposed}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    return METRICS_INTRO + "\n" + _metric_rows(METRICS) + METRICS_EDGE + _metric_rows(EDGE_METRICS)


CLI_INTRO = """\
# The command line

*Made from the commands' own help by `make docs`.*

`tailrace` without anything, or any command with `--help`, explains itself. Commands that talk to a server
take `--url` (or `TAILRACE_URL`; `TAILRACE_ENDPOINT` is read too) and `--token` (or `TAILRACE_TOKEN`). With
`--json` they print one object per line, errors included, for scripts.

## Exit codes

Every command keeps to this table. `pipeline shadow` has 2 for every failure, so that a release can be held on
3: the two versions differ.

| exit code | meaning |
|---|---|
"""


def cli_page() -> str:
    parts = [CLI_INTRO + "".join(f"| {code} | {meaning} |\n" for code, meaning in EXIT_CODES.items())]
    for verb in VERBS:
        command = importlib.import_module(f"tailrace.cli.{verb}").command
        text = command.generate_docs(heading_level=2, usage_name=f"tailrace {verb}")
        text = text.replace(" *[default: False]*", "").replace(' *[default: ""]*', "")
        text = re.sub(
            r"^#+ Table of Contents\n.*?(?=^\*\*Commands)", "", text, flags=re.MULTILINE | re.DOTALL
        )
        if verb in ("serve", "edge"):
            text = (
                text[: text.index("**Settings**")]
                + "The flags are the settings: see [settings.md](settings.md).\n"
            )
        parts.append(text)
    return "\n".join(part.strip() + "\n" for part in parts)


ERRORS_INTRO = """\
# Error codes

*Made from `common/errors.py` by `make docs`.*

Every error response has the same form. Programs test `code`; `message` is for people and may change; some
errors have further members, which [http.md](http.md) describes with their routes.

```json
{"error": {"code": "not_found", "message": "there is no stream 'orders'"}}
```

Errors with a retry time carry `Retry-After`, and nothing was changed when they are sent: repeat the request
as it is. After 408 and 500 a read may be repeated too. All other errors come again until the request or the
resource changes.
"""


def errors_page() -> str:
    parts = [ERRORS_INTRO]
    for area, kinds in ERROR_CATALOGUE.items():
        rows = [
            f"\n## {area}\n",
            "| status | code | meaning | what to do | retry after |",
            "|---|---|---|---|---|",
        ]
        for code, kind in sorted(kinds.items(), key=lambda found: found[1].status):
            retry = "" if kind.retry_after_s is None else f"{kind.retry_after_s} s"
            rows.append(f"| {kind.status} | `{code}` | {kind.meaning} | {kind.remedy} | {retry} |")
        parts.append("\n".join(rows) + "\n")
    return "".join(parts)


ROUTES_INTRO = """\
# Routes

*Made from the routing table by `make docs`.*

All routes of a server, with the scope that a token needs when authentication is configured; `manage` includes
`read` and `write`. [auth.md](auth.md#what-each-route-needs) says what is checked beside the scope, such as
the streams and databases of a token. `GET /openapi.json` describes parameters, bodies and responses. Every
GET also takes HEAD, and every path OPTIONS.
"""


def _scope(action: Action) -> str:
    if action is Action.PUBLIC:
        return "no token"
    if action is Action.ANSWER_WAKE:
        return "the token of the wake"
    scopes = [f"`{scope}`" for scope in action.required_scopes.split(" or ") if scope]
    return " or ".join(scopes) or "any valid token"


def routes_page() -> str:
    parts = [ROUTES_INTRO]
    for tag in dict.fromkeys(route.tag for route in ROUTES):
        rows = [route for route in ROUTES if route.tag == tag]
        lines = [f"## {tag.capitalize()}\n", "| route | scope | operation |", "|---|---|---|"]
        lines += [f"| {row.method} `{row.path}` | {_scope(row.action)} | {row.summary} |" for row in rows]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


PAGES = {
    "settings.md": settings_page,
    "metrics.md": metrics_page,
    "cli.md": cli_page,
    "errors.md": errors_page,
    "routes.md": routes_page,
}


def main() -> int:
    stale = 0
    for name, make in PAGES.items():
        path, text = DOCS / name, make()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if "--check" in sys.argv[1:]:
            print(f"docs/{name} is stale: run make docs", file=sys.stderr)
            stale += 1
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote docs/{name}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
