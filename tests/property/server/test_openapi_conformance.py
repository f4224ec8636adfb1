"""Generated requests to a real server: nothing breaks, and every answer is as the description says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode

from support.described import OPERATIONS, SHORT_WAITS, WAIT_MS, Described, prepare
from support.server import ServerProcess
from support.wire import Wire

EXAMPLES = 10  # for each operation and kind of data
SEALS = 2  # they wait for disks and have one parameter
GENERATED = [label for label in OPERATIONS if not label.startswith("OPTIONS ")]
# Which of the prepared streams an operation can do most with.
APT = {
    "/touch/": "state",
    "/_otlp/": "spans",
    **dict.fromkeys(("/_search", "/_aggregate", "/_schema", "/_routing_keys"), "json"),
}
QUERIES = ["service:a", "status:>=500 -has:service", "(service:a OR service:b) NOT status:200", "serv"]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    process = ServerProcess(tmp_path_factory.mktemp("openapi") / "data", env=SHORT_WAITS).start()
    wire = Wire(process.port)
    yield wire
    wire.close()
    process.stop()


@st.composite
def cases(draw: st.DrawFn, label: str, mode: GenerationMode, names: list[str]) -> Any:
    """A request of this kind. Mostly it is about something that exists."""
    case = draw(OPERATIONS[label].as_strategy(generation_mode=mode))
    base = names[0].partition("/")[0]
    apt = [f"{base}/{name}" for part, name in APT.items() if part in label]
    if "name" in case.path_parameters:
        name = draw(st.sampled_from([*apt * 6, *names, "__registry__", ""]))
        case.path_parameters["name"] = name or case.path_parameters["name"]
    if "id" in case.path_parameters and draw(st.booleans()):
        case.path_parameters["id"] = base
    for name in ("q", "filter"):
        if name in case.query and draw(st.booleans()):
            case.query[name] = draw(st.sampled_from(QUERIES))
    if label.endswith("/_seal"):
        # Everything at once takes as long as everything that other tests have left.
        case.query["stream"] = draw(st.sampled_from(names))
    if isinstance(case.body, dict) and label.endswith("/touch/wait"):
        # Nothing bounds these waits but what they ask for.
        case.body["timeoutMs"] = draw(st.integers(0, WAIT_MS))
    if isinstance(case.body, dict) and label.endswith("/_aggregate") and draw(st.booleans()):
        case.body |= {"rollup": "requests", "interval": "1h"}
    if isinstance(case.body, dict) and label.endswith("/_search") and draw(st.booleans()):
        case.body["q"] = draw(st.sampled_from(QUERIES))
    return case


@pytest.mark.parametrize("label", GENERATED)
def test_answers_are_as_described(label: str, http: Wire) -> None:
    number = GENERATED.index(label)
    names = prepare(http, f"op{number}")
    described = Described(http.port)

    def run(mode: GenerationMode) -> None:
        @seed(number)
        @settings(
            max_examples=SEALS if label.endswith("/_seal") else EXAMPLES,
            database=None,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=[
                HealthCheck.too_slow,
                HealthCheck.filter_too_much,
                HealthCheck.data_too_large,
            ],
        )
        @given(case=cases(label, mode, names))
        def ask(case: Any) -> None:
            described.send(case)

        ask()

    try:
        run(GenerationMode.POSITIVE)
        # What is wrong with a GET is wrong with a HEAD.
        if not label.startswith("HEAD ") and (OPERATIONS[label].query or OPERATIONS[label].body):
            run(GenerationMode.NEGATIVE)
    finally:
        described.close()
    assert http.get("/healthz").status == 200
