"""Log lines, seen as a process writes them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

PROGRAM = """
import logging
from tailrace.common.logging_setup import add_common_fields, configure_logging
configure_logging({level!r}, {form!r})
log = logging.getLogger("tailrace.test")
log.debug("fine detail")
fields = dict(stream="orders", access_token="abc.def", Authorization="Bearer x", size_bytes=5)
log.info("ours", extra=dict(fields=fields))
add_common_fields(worker=3)
logging.getLogger("asyncio").warning("theirs %s", 1)
try:
    secret_local = "hunter2"
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


def _log(level: str, form: str) -> str:
    program = PROGRAM.format(level=level, form=form)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "", "standard output belongs to the command"
    return done.stderr


def _events(level: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _log(level, "json").splitlines()]


def test_json_lines_carry_fields_and_time() -> None:
    ours, theirs, failed = _events("info")
    assert ours["event"] == "ours"
    assert (ours["level"], ours["stream"], ours["size_bytes"]) == ("info", "orders", 5)
    assert ours["timestamp"].endswith("Z")
    assert (theirs["event"], theirs["logger"], theirs["level"]) == ("theirs 1", "asyncio", "warning")
    assert "ZeroDivisionError" in failed["exception"]
    assert "worker" not in ours
    assert theirs["worker"] == failed["worker"] == 3, "what belongs to all lines"


def test_secrets_never_reach_a_line() -> None:
    for form in ("json", "console"):
        text = _log("debug", form)
        assert "abc.def" not in text
        assert "Bearer" not in text
        assert "hunter2" not in text.replace('secret_local = "hunter2"', "")


def test_the_level_decides_what_is_written() -> None:
    assert next(event["event"] for event in _events("debug")) == "fine detail"
    assert [event["event"] for event in _events("error")] == ["failed"]


def test_auto_writes_json_into_a_pipe() -> None:
    assert _log("info", "auto").startswith("{")
