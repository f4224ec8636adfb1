"""What cutting a JSON body costs: memory within a small multiple of the body, and time that grows with it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tailrace.common.errors import TailraceError
from tailrace.hub import envelope
from tailrace.hub.errors import HubError
from tailrace.protocol import json_split
from tailrace.schema.json_values import parse_pointer
from tailrace.search import query_language
from tailrace.search.query_language import FILTER_DIALECT
from tailrace.watch.sources import postgres_decoder

MIB = 1024 * 1024
BODY_BYTES = 8 * MIB
# The body itself, a copy without escapes, the joined entries once in pieces and once whole, their lengths
# (four bytes for each, and an entry takes two), and some megabytes that do not depend on the body.
MULTIPLE_MAX = 10
FIXED_BYTES = 48 * MIB
# Repeated to the size of a body, inside of an array, of a string, or of an array that is in a string.
units = st.lists(
    st.sampled_from(
        [
            "[",
            "]",
            "{",
            "}",
            '"',
            ",",
            "\\",
            "\\\\",
            '\\"',
            "\\n",
            "\\ud800",
            "\\udc00",
            "0",
            "x",
            " ",
            "é",
            '""',
        ]
    ),
    min_size=1,
    max_size=6,
).map("".join)
wrappers = st.sampled_from(
    ["%s", '"%s"', '["%s"]', "[%s]", '["%s[[[[",1]', '["\\ud800",%s]', "[[%s]]", '[0,"%s']
)


def _resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def _measure(work: Callable[[], object]) -> tuple[int, float]:
    """Bytes by which resident memory grew at most, and seconds.

    Resident memory and not `tracemalloc`: what `re` and decoders in C allocate is not Python's.
    """
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    begun = time.process_time()
    try:
        work()
    except TailraceError:
        pass
    spent = time.process_time() - begun
    return _resident("VmHWM") - before, spent


def _cut(unit: str, wrapper: str) -> tuple[int, float]:
    filling = unit * (BODY_BYTES // len(unit.encode()))
    body = wrapper.replace("%s", filling).encode()
    del filling
    return _measure(partial(json_split.split_to_block, body, 512, len(body)))


def _run(work: Callable[[object], object], text: object) -> None:
    try:
        work(text)
    except HubError:
        pass


def _apart(work: Callable[[], tuple[int, float]]) -> tuple[int, float]:
    """In a process of its own: freed memory of other work would hide what this takes."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(work).result()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(units, wrappers)
@example("[", '"%s"')  # brackets in a string
@example("x", '["%s[[[[[[[[[[[",1]')
@example("\\n", '"\\ud800%s"')  # escapes beside half of a surrogate pair
@example("\\ud800", '"%s"')
@example("0,", "[%s0]")  # many elements
@example('"",', '[%s""]')
@example("[],", "[%s[]]")
@example("[],", "[[%s[]]]")
@example('"\\ud800",', "[%s0]")
@example(" 0 ,", "[%s0]")
def test_memory_and_time_are_bounded_by_the_body(unit: str, wrapper: str) -> None:
    grown, spent = _apart(partial(_cut, unit, wrapper))
    assert grown <= MULTIPLE_MAX * BODY_BYTES + FIXED_BYTES, f"{grown / MIB:.0f} MiB"
    assert spent < 2.0, f"{spent:.2f} s for {BODY_BYTES} bytes"


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (parse_pointer, "/" + "ab~0" * MIB),
        (envelope.check_frame_text, b'{"a":"' + b"\\n" * 2 * MIB + b'","b":' + b"[" * 65 + b"]" * 65 + b"}"),
        (partial(query_language.tokenize, dialect=FILTER_DIALECT), 'a:"' + "b" * 4 * MIB + '"'),
        (partial(postgres_decoder.parse_array, convert=str), '{"' + "b" * 4 * MIB + '"}'),
    ],
    ids=["JSON pointer", "hub message", "filter", "PostgreSQL array"],
)
def test_no_pattern_keeps_a_state_for_every_character(work: Callable[[object], object], text: object) -> None:
    grown, spent = _apart(partial(_measure, partial(_run, work, text)))
    assert grown <= MULTIPLE_MAX * 4 * MIB, f"{grown / MIB:.0f} MiB"
    assert spent < 2.0
