"""Commands that start Spark, where there is nothing to start it with: one line, and the code of a refusal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.cli import Finished, tailrace
from support.ports import free_port
from tailrace.cli.errors import RefusedError
from tailrace.cli.spark_requirements import require_spark

COMMANDS = (("sql", "select 1"), ("pipeline", "run", "--once"), ("pipeline", "stats", "--collection", "x"))
NO_JAVA = "no Java 17+ found: set JAVA_HOME, or put java on the PATH (see tailrace doctor)"


def refusal(done: Finished) -> str:
    """The one line that was said."""
    assert (done.code, done.out) == (1, "")
    (line,) = done.err.splitlines()
    return line


def java(directory: Path, version: str) -> Path:
    """A home of a Java that can say what it is, and nothing else."""
    said = f'openjdk version "{version}" 2024-07-16'
    place = directory / version / "bin" / "java"
    place.parent.mkdir(parents=True)
    place.write_text(f"#!/bin/sh\ncase $* in -version) echo '{said}' >&2;; *) exit 1;; esac\n")
    place.chmod(0o755)
    return directory / version


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]))
def test_p16_without_java(words: tuple[str, ...], tmp_path: Path) -> None:
    nothing = {"PATH": str(tmp_path), "JAVA_HOME": ""}
    assert NO_JAVA in refusal(tailrace(*words, env=nothing))
    old = {"PATH": str(tmp_path), "JAVA_HOME": str(java(tmp_path, "11.0.2"))}
    assert NO_JAVA in refusal(tailrace(*words, env=old))


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]))
def test_without_a_server_nothing_is_started(words: tuple[str, ...], tmp_path: Path) -> None:
    """This Java can start nothing: whoever tried would say something else, and much later."""
    nobody = f"http://127.0.0.1:{free_port()}"
    env = {"PATH": str(tmp_path), "JAVA_HOME": str(java(tmp_path, "21.0.1")), "TAILRACE_ENDPOINT": nobody}
    done = tailrace(*words, env=env)
    said = f"tailrace: no server responds at {nobody}; start one with: tailrace serve (unreachable)\n"
    assert (done.code, done.out, done.err) == (4, "", said)


def test_connect_needs_no_java_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server behind `sc://` has one of its own."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", "")
    require_spark("sc://there")
    with pytest.raises(RefusedError, match="no Java"):
        require_spark("spark://there:7077")


def test_an_old_java_home_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark itself would take it, although there is a better one on the path."""
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path, "11.0.2")))
    monkeypatch.setenv("PATH", str(java(tmp_path, "21.0.1") / "bin"))
    require_spark("local[1]")
    assert "JAVA_HOME" not in os.environ
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "21.0.1"))
    require_spark("local[1]")
    assert os.environ["JAVA_HOME"] == str(tmp_path / "21.0.1")
