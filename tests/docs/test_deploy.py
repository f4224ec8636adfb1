"""What is deployed beside the server speaks of things that exist: metrics, settings, files, alerts."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from tailrace.cli.app import VERBS
from tailrace.common.server_metrics import SERVER_METRICS as METRICS
from tailrace.common.settings import SETTINGS_TABLE as SETTINGS
from tailrace.edge.metrics import TABLE as EDGE_METRICS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
RULES: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "prometheus" / "tailrace.rules.yaml").read_text())[
    "groups"
][0]["rules"]
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "tailrace.json").read_text())
# What Prometheus itself adds, and what its client library says of every process.
OTHERS = {
    "up",
    "process_open_fds",
    "process_max_fds",
    "process_resident_memory_bytes",
    "process_cpu_seconds_total",
}
_SERIES = re.compile(r"\b(up|tailrace_\w+|process_\w+)(?:\{([^}]*)\})?")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")
_BY = re.compile(r"\bby \(([^)]*)\)")


def series() -> dict[str, set[str]]:
    """Every series of `/metrics` with its labels."""
    known: dict[str, set[str]] = {}
    for metric in (*METRICS.values(), *EDGE_METRICS.values()):
        if metric.kind == "histogram":
            known[f"{metric.exposed}_bucket"] = {*metric.labels, "le"}
            known[f"{metric.exposed}_sum"] = known[f"{metric.exposed}_count"] = set(metric.labels)
        else:
            known[metric.exposed] = set(metric.labels)
    return known


def panels() -> Iterator[dict[str, Any]]:
    return (panel for panel in BOARD["panels"] if panel["type"] != "row")


def queries() -> list[str]:
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [*shown, *(rule["expr"] for rule in RULES)]


@pytest.mark.parametrize("query", queries())
def test_queries_ask_for_what_there_is(query: str) -> None:
    known = series()
    asked = _SERIES.findall(query)
    assert asked, "a query without a metric"
    labels = {"instance", "job"}
    for name, selectors in asked:
        assert name in known or name in OTHERS, name
        assert set(_LABEL.findall(selectors)) <= {*known.get(name, ()), "instance", "job"}, selectors
        labels |= known.get(name, set())
    for group in _BY.findall(query):
        assert {label.strip() for label in group.split(",")} <= labels, group
    assert query.count("(") == query.count(")")
    assert query.count("{") == query.count("}")


def test_a_counter_is_asked_for_its_rate() -> None:
    """The number itself says nothing: it begins again with every start."""
    everything = (*METRICS.values(), *EDGE_METRICS.values())
    counters = [metric.exposed for metric in everything if metric.kind == "counter"]
    raw = [
        f"{name} in {query}"
        for query in queries()
        for name in counters
        if re.search(rf"(?<!rate\()(?<!increase\(){name}\b", query)
    ]
    assert raw == []


def test_every_alert_is_explained_and_every_explanation_is_an_alert() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = page[page.index("## Alerts") : page.index("## When something is wrong")]
    explained = re.findall(r"^\| `(Tailrace\w+)` \| (page|ticket): [^|]+ \| [^|]+ \|$", section, re.MULTILINE)
    declared = [(rule["alert"], rule["labels"]["severity"]) for rule in RULES]
    assert explained == declared
    assert len({name for name, _ in declared}) == len(declared)
    assert all(rule["annotations"]["summary"] for rule in RULES)


def test_the_dashboard_can_be_imported() -> None:
    assert (BOARD["title"], BOARD["uid"]) == ("Tailrace", "tailrace")
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    covered: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & covered, f"{panel['title']} lies on another panel"
        assert max(x for x, _ in cells) < 24
        covered |= cells
    assert all(panel["title"] and panel["fieldConfig"]["defaults"]["unit"] for panel in panels())


def instructions() -> list[tuple[str, str]]:
    """The lines of the Containerfile, with continued ones joined and comments left out."""
    text = (DEPLOY / "Containerfile").read_text()
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [(word, rest) for line in joined.splitlines() if line for word, _, rest in [line.partition(" ")]]


def test_the_containerfile_is_what_an_image_should_be() -> None:
    steps = instructions()
    known = {"FROM", "WORKDIR", "COPY", "RUN", "USER", "VOLUME", "ENV", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"}
    assert {word for word, _ in steps} <= known | {"ENTRYPOINT", "CMD"}
    stages = [rest for word, rest in steps if word == "FROM"]
    assert all(re.match(r"[\w./-]+:[\w.-]+( AS \w+)?$", stage) for stage in stages), "images have a version"
    assert not any(":latest" in stage for stage in stages)
    (user,) = [rest for word, rest in steps if word == "USER"]
    assert user.isdigit(), "by number, so that an orchestrator can see that it is not root"
    assert user != "0"
    begin = max(index for index, (word, _) in enumerate(steps) if word == "FROM")
    last = [word for word, _ in steps[begin:]]
    assert last.index("RUN") < last.index("USER") < last.index("ENTRYPOINT")
    for word, rest in steps:
        if word in ("ENTRYPOINT", "CMD"):
            assert isinstance(json.loads(rest), list), "signals reach the server itself, not a shell"
        if word == "COPY" and not rest.startswith("--from="):
            *sources, _ = shlex.split(rest)
            assert all((ROOT / source).exists() for source in sources), rest
        if word == "RUN" and "pip install" in rest:
            assert "--no-cache-dir" in rest
            assert "--require-hashes" in rest or "--no-deps" in rest
    settings = dict(pair.split("=", 1) for word, rest in steps if word == "ENV" for pair in shlex.split(rest))
    check_settings(settings)
    (cmd,) = [json.loads(rest) for word, rest in steps if word == "CMD"]
    assert cmd[0] in VERBS


def check_settings(variables: dict[str, str]) -> None:
    known = {setting.env for setting in SETTINGS.values()}
    unknown = [name for name in variables if name.startswith("TAILRACE_") and name not in known]
    assert unknown == []


def test_the_services_are_named_set_up_and_shut() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    assert (
        DEPLOY / services["tailrace"]["build"]["context"] / services["tailrace"]["build"]["dockerfile"]
    ).is_file()
    for service in services.values():
        check_settings(service.get("environment", {}))
        if "image" in service:
            assert re.fullmatch(r"[\w./-]+:v?\d[\w.]*", service["image"])
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "nothing is open to the network by default"
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).exists()
        assert set(service.get("depends_on", {})) <= set(services)
    secrets = {"TAILRACE_AUTH_JWT_SECRET", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"}
    for service in services.values():
        for name, value in service.get("environment", {}).items():
            assert name not in secrets or value.startswith("${"), f"{name} is given from outside"


def test_prometheus_finds_the_rules_the_server_and_the_edge() -> None:
    folder = DEPLOY / "prometheus"
    config = yaml.safe_load((folder / "prometheus.yml").read_text())
    assert all((folder / name).is_file() for name in config["rule_files"])
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    scraped = {job["job_name"]: job["static_configs"] for job in config["scrape_configs"]}
    ports = {
        name: services[name]["environment"][variable]
        for name, variable in (("tailrace", "TAILRACE_METRICS_PORT"), ("edge", "TAILRACE_EDGE_METRICS_PORT"))
    }
    assert scraped == {
        "tailrace": [{"targets": [f"tailrace:{ports['tailrace']}"]}],
        "tailrace-edge": [{"targets": [f"edge:{ports['edge']}"]}],
    }


def test_the_alerts_watch_every_job() -> None:
    """A rule that names a job names them all: an edge that is down is missed as much as a server."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    jobs = [job["job_name"] for job in config["scrape_configs"]]
    named = {
        (rule["alert"], pattern) for rule in RULES for pattern in re.findall(r'job=~?"([^"]*)"', rule["expr"])
    }
    assert named
    for alert, pattern in named:
        assert all(re.fullmatch(pattern, job) for job in jobs), alert


def test_the_unit_starts_a_server_that_can_do_little_else() -> None:
    unit = ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "tailrace.service")
    service = unit["Service"]
    program, verb, *flags = shlex.split(service["ExecStart"])
    assert program.endswith("/tailrace")
    assert verb in VERBS
    known = {setting.flag for setting in SETTINGS.values()}
    assert {flag for flag in flags if flag.startswith("--")} <= known
    assert f"/var/lib/{service['StateDirectory']}" in flags
    drain_s = int(SETTINGS["drain_ms"].default) / 1000
    assert int(service["TimeoutStopSec"]) > drain_s
    expected = {
        "DynamicUser": "yes",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "PrivateTmp": "yes",
        "PrivateDevices": "yes",
        "CapabilityBoundingSet": "",
        "UMask": "0077",
        "Restart": "always",
    }
    assert {name: service[name] for name in expected} == expected
    assert int(service["LimitNOFILE"]) >= int(SETTINGS["connections"].default)
