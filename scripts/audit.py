"""`make audit`: compares every locked package with the public advisories. Needs the network.

Exit codes: 0 if nothing is known against any of them, 1 if there are advisories, 2 if that could not be found
out for all of them. An advisory service that is not reached is no good news: pip-audit by itself says that
there are no known vulnerabilities when it has found none of the packages. Then the index that pip installs
from is asked, which tells the advisories of the newest version of a package, and says nothing of others.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ("requirements/run.txt", "requirements/dev.txt")
NPM_LOCKS = ("tests/conformance", "clients/hub-js", "bench")
CLEAN, VULNERABLE, UNKNOWN = 0, 1, 2
INDEX_S_MAX = 30.0

Pin = tuple[str, str]  # a package and the version of it that is locked


class Outcome(NamedTuple):
    """What came of one look: advisories, and what could not be asked for."""

    advisories: list[str]
    unknown: list[str]

    @property
    def code(self) -> int:
        return VULNERABLE if self.advisories else UNKNOWN if self.unknown else CLEAN


def of_pip_audit(output: str, errors: str) -> Outcome:
    """What `pip-audit --format json` says. Packages that it skipped were not looked at."""
    try:
        dependencies = json.loads(output)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return Outcome([], [_last_line(errors)])
    advisories = [
        f"{found['name']} {found['version']}: {vulnerability['id']}, mended in {_versions(vulnerability)}"
        for found in dependencies
        for vulnerability in found.get("vulns", ())
    ]
    skipped = [found["skip_reason"] for found in dependencies if "skip_reason" in found]
    return Outcome(advisories, skipped if dependencies else ["it found no packages"])


def pins_in(requirements: str) -> list[Pin]:
    return re.findall(r"^([\w.-]+)==([^\s;\\]+)", requirements, re.MULTILINE)


def of_index(pins: Iterable[Pin], ask: Callable[[str], Any]) -> Outcome:
    """What the index says of packages; `ask` has its document of one."""
    outcome = Outcome([], [])
    for name, version in pins:
        try:
            told = ask(name)
            newest, found = told["info"]["version"], told["vulnerabilities"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            outcome.unknown.append(f"{name} {version}: {error}")
            continue
        if newest != version:
            outcome.unknown.append(f"{name} {version}: the index speaks of {newest} only")
            continue
        for one in found:
            mended = {"fix_versions": one.get("fixed_in")}
            outcome.advisories.append(f"{name} {version}: {one['id']}, mended in {_versions(mended)}")
    return outcome


def of_npm_audit(output: str, errors: str) -> Outcome:
    """What `npm audit --json` says: its exit code is the same for advisories and for failures."""
    try:
        found = json.loads(output)
        vulnerable = found["vulnerabilities"]
    except (ValueError, KeyError, TypeError):
        return Outcome([], [_last_line(errors)])
    return Outcome([f"{name} {of['range']}: {of['severity']}" for name, of in sorted(vulnerable.items())], [])


def _versions(vulnerability: dict[str, Any]) -> str:
    return ", ".join(vulnerability.get("fix_versions") or ["no version yet"])


def _last_line(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    # npm ends with the name of its log.
    told = [line for line in lines if "complete log of this run" not in line]
    return told[-1] if told else "it said nothing"


def _run(command: Sequence[str], directory: Path) -> tuple[str, str]:
    done = subprocess.run(  # noqa: S603 - the commands are those of this file
        command, cwd=directory, capture_output=True, text=True, check=False
    )
    return done.stdout, done.stderr


def _ask_index(name: str) -> Any:
    """Pip knows where its index is, and tells it to nobody but itself."""
    index: str = importlib.import_module("pip._internal.models.index").PyPI.pypi_url
    with urllib.request.urlopen(f"{index}/{name}/json", timeout=INDEX_S_MAX) as answer:  # noqa: S310
        return json.load(answer)


def _python(name: str) -> Outcome:
    command = [sys.executable, "-m", "pip_audit", "--requirement", name, "--require-hashes"]
    command += ["--disable-pip", "--progress-spinner", "off", "--format", "json"]
    found = of_pip_audit(*_run(command, ROOT))
    if not found.unknown:
        return found
    print(f"{name}: pip-audit says: {found.unknown[0]}; the index is asked for newest versions")
    told = of_index(pins_in((ROOT / name).read_text()), _ask_index)
    return Outcome(sorted({*found.advisories, *told.advisories}), told.unknown)


def _looks() -> list[tuple[str, Outcome]]:
    found = [(name, _python(name)) for name in REQUIREMENTS]
    for name in NPM_LOCKS:
        command = ["npm", "audit", "--package-lock-only", "--json"]
        found.append((f"{name}/package-lock.json", of_npm_audit(*_run(command, ROOT / name))))
    return found


def report(looks: Sequence[tuple[str, Outcome]]) -> int:
    """Prints what was found, and gives the exit code."""
    for name, outcome in looks:
        verdict = {CLEAN: "clean", VULNERABLE: "ADVISORIES", UNKNOWN: "NOT KNOWN"}[outcome.code]
        print(f"{name}: {verdict}")
        for line in outcome.advisories:
            print(f"  {line}")
        if outcome.unknown:
            print(f"  {len(outcome.unknown)} could not be looked up, such as: {outcome.unknown[0]}")
    codes = {outcome.code for _, outcome in looks}
    if UNKNOWN in codes or any(outcome.unknown for _, outcome in looks):
        print("the advisory services were not reached for all packages; this says nothing about those")
    return VULNERABLE if VULNERABLE in codes else UNKNOWN if UNKNOWN in codes else CLEAN


if __name__ == "__main__":
    sys.exit(report(_looks()))
