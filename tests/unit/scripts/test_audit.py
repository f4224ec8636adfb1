"""`make audit` calls nothing clean that it has not looked at."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "scripts" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_lock_is_looked_at(audit: ModuleType) -> None:
    assert {path.parent.relative_to(ROOT).as_posix() for path in _locks()} == set(audit.NPM_LOCKS)
    listed = {path.relative_to(ROOT).as_posix() for path in (ROOT / "requirements").glob("*.txt")}
    assert listed == set(audit.REQUIREMENTS)


def _locks() -> list[Path]:
    return [path for path in ROOT.glob("*/**/package-lock.json") if "node_modules" not in path.parts]


def test_packages_without_advisories_are_clean(audit: ModuleType) -> None:
    outcome = audit.of_pip_audit(
        json.dumps({"dependencies": [{"name": "a", "version": "1", "vulns": []}], "fixes": []}), ""
    )
    assert outcome == ([], [])
    assert audit.of_npm_audit(json.dumps({"vulnerabilities": {}, "metadata": {}}), "") == ([], [])
    assert audit.report([("run.txt", outcome)]) == audit.CLEAN


def test_advisories_are_named_with_what_mends_them(audit: ModuleType) -> None:
    vulns = [{"id": "PYSEC-1", "fix_versions": ["1.2"]}, {"id": "GHSA-2", "fix_versions": []}]
    found = {"dependencies": [{"name": "a", "version": "1.1", "vulns": vulns}]}
    outcome = audit.of_pip_audit(json.dumps(found), "")
    assert outcome.advisories == ["a 1.1: PYSEC-1, mended in 1.2", "a 1.1: GHSA-2, mended in no version yet"]
    of_npm = audit.of_npm_audit(
        json.dumps({"vulnerabilities": {"ws": {"range": "<8.17.1", "severity": "high"}}}), ""
    )
    assert of_npm.advisories == ["ws <8.17.1: high"]
    assert audit.report([("a", outcome), ("b", of_npm)]) == audit.VULNERABLE


@pytest.mark.parametrize(
    ("which", "output", "errors", "reason"),
    [
        (
            "pip",
            '{"dependencies": [{"name": "a", "skip_reason": "not found on PyPI"}]}',
            "",
            "not found on PyPI",
        ),
        ("pip", '{"dependencies": []}', "", "it found no packages"),
        ("pip", "", "Traceback\nConnectionError: no route\n", "ConnectionError: no route"),
        (
            "npm",
            '{"message": "405", "error": {}}',
            "npm error 405\nnpm error A complete log of this run is",
            "",
        ),
        ("npm", "", "", "it said nothing"),
    ],
)
def test_what_was_not_reached_is_not_clean(
    audit: ModuleType, which: str, output: str, errors: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = (audit.of_pip_audit if which == "pip" else audit.of_npm_audit)(output, errors)
    assert audit.report([("lock", outcome), ("other", audit.Outcome([], []))]) == audit.UNKNOWN
    assert reason in outcome.unknown[0]
    shown = capsys.readouterr().out
    assert "lock: NOT KNOWN" in shown
    assert "services were not reached" in shown


def test_where_pip_audit_fails_the_index_speaks_of_newest_versions(audit: ModuleType) -> None:
    pins = audit.pins_in("a==1.0 \\\n    --hash=sha256:00\nb==2.1 ; python_version < '3.12' \\\nc==3\nd==4\n")
    assert pins == [("a", "1.0"), ("b", "2.1"), ("c", "3"), ("d", "4")]
    told = {
        "a": {"info": {"version": "1.0"}, "vulnerabilities": []},
        "b": {"info": {"version": "2.2"}, "vulnerabilities": []},
        "c": {"info": {"version": "3"}, "vulnerabilities": [{"id": "PYSEC-3", "fixed_in": ["3.1"]}]},
    }

    def ask(name: str) -> object:
        if name not in told:
            raise OSError("no route")
        return told[name]

    outcome = audit.of_index(pins, ask)
    assert outcome.advisories == ["c 3: PYSEC-3, mended in 3.1"]
    assert outcome.unknown == ["b 2.1: the index speaks of 2.2 only", "d 4: no route"]
    assert audit.of_index(pins[:1], ask).code == audit.CLEAN
    assert audit.of_index(pins[:2], ask).code == audit.UNKNOWN
