"""The error catalogue is complete: every code that the source raises is explained, and none is unused."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tailrace
from tailrace.common.errors import ERROR_CATALOGUE, ERROR_STATUS, ErrorKind, TailraceError

SOURCE = Path(tailrace.__file__).parent
KINDS = [(code, kind) for kinds in ERROR_CATALOGUE.values() for code, kind in kinds.items()]


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        if path != SOURCE / "common" / "errors.py":
            yield str(path.relative_to(SOURCE)), ast.parse(path.read_text(encoding="utf-8"))


def test_every_code_that_is_raised_is_in_the_catalogue() -> None:
    unknown = [
        f"{name}:{call.lineno} {call.args[0].value}"
        for name, module in _modules()
        for call in ast.walk(module)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "TailraceError"
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and call.args[0].value not in ERROR_STATUS
    ]
    assert unknown == []


def test_every_code_of_the_catalogue_is_used() -> None:
    used = {
        node.value
        for _, module in _modules()
        for node in ast.walk(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert [code for code in ERROR_STATUS if code not in used] == []


@pytest.mark.parametrize(("code", "kind"), KINDS, ids=[code for code, _ in KINDS])
def test_a_code_has_a_status_a_meaning_and_a_remedy(code: str, kind: ErrorKind) -> None:
    assert 400 <= kind.status <= 599
    for text in (kind.meaning, kind.remedy):
        assert text[0].isupper()
        assert text.endswith(".")
    assert (kind.retry_after_s is not None) == (kind.status in (429, 503, 507))
    assert TailraceError(code, "x").status == kind.status


def test_no_code_has_two_meanings() -> None:
    assert len(ERROR_STATUS) == len(KINDS)
