"""Parts of a server with several workers that need no process: where names live, how answers are joined."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.workers.gather import added, labelled
from tailrace.workers.placement import Placement, own_suffix, stream_in


@given(st.text(min_size=1), st.integers(1, 16))
def test_a_name_has_one_home_and_moves_only_to_a_worker_that_is_new(name: str, count: int) -> None:
    home, later = Placement(count).home(name), Placement(count + 1).home(name)
    assert 0 <= home < count
    assert later in (home, count) or name.startswith("__")


def test_names_are_spread_evenly() -> None:
    placement = Placement(4)
    homes = [placement.home(f"stream/{number}") for number in range(4000)]
    assert all(800 < homes.count(worker) < 1200 for worker in range(4))


def test_what_the_server_keeps_for_itself_is_on_the_first_worker() -> None:
    placement = Placement(4)
    for name in (
        "__registry__",
        "__changes__/db/orders/3",
        "hub/registry",
        "hub/mailbox/a",
        "__registry__/7",
    ):
        assert placement.home(name) == 0
    for worker in range(1, 4):
        assert placement.home("__registry__" + own_suffix(worker)) == worker


def test_the_stream_of_a_path() -> None:
    for path, name in (
        (b"a/b", "a/b"),
        (b"a%2Fb", "a/b"),
        (b"a/_schema", "a"),
        (b"a/b/_details", "a/b"),
        (b"a/pk/k%2F1", "a"),
        (b"a/touch/wait", "a"),
        (b"a/_otlp/v1/traces", "a"),
        (b"%ff", None),
    ):
        assert stream_in(b"/v1/stream/" + path) == name
    assert stream_in(b"/v1/stream/a/_schema", whole=True) == "a/_schema"


def test_metrics_of_workers_become_one_text() -> None:
    one = '# HELP a A.\n# TYPE a counter\na 1.0\n# HELP b B.\n# TYPE b gauge\nb{mode="x"} 2.0\n'
    text = labelled({0: one, 2: one})
    assert text.splitlines() == [
        *("# HELP a A.", "# TYPE a counter", 'a{worker="0"} 1.0', 'a{worker="2"} 1.0'),
        *("# HELP b B.", "# TYPE b gauge", 'b{worker="0",mode="x"} 2.0', 'b{worker="2",mode="x"} 2.0'),
    ]


def test_numbers_add_up_and_settings_do_not() -> None:
    part = {
        "configured_limits": {"x": 5},
        "runtime": {"n": 2, "on": False, "top": [1], "at": "now", "no": None},
    }
    other = {
        "configured_limits": {"x": 5},
        "runtime": {"n": 3, "on": True, "top": [2], "at": "then", "no": None},
    }
    assert added([part, other]) == {
        "configured_limits": {"x": 5},
        "runtime": {"n": 5, "on": True, "top": [1, 2], "at": "now", "no": None},
    }
