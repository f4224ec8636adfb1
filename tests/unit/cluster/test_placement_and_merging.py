"""Parts of a server with several workers that need no process: where names live, how answers are joined."""

from __future__ import annotations

from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster.layout import Layout, choose_worker_count, write_layout
from tailrace.cluster.peers import Placement, stream_in_path, system_stream_suffix
from tailrace.cluster.pipeline import PlanPart, merge_plans, page_starts
from tailrace.cluster.proxy import TOUCH_S_MAX, owner_wait_s
from tailrace.cluster.scatter_gather import merge_json, merge_metrics
from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings
from tailrace.common.token_bucket import Rate, TokenBuckets
from tailrace.server.rate_limits import SLOTS, SharedTokenBuckets


@given(st.text(min_size=1), st.integers(1, 16), st.integers(1, 16))
def test_h42_a_name_has_one_home_and_moves_only_to_a_worker_that_is_new(
    name: str, count: int, more: int
) -> None:
    home, later = Placement(count).owner(name), Placement(count + more).owner(name)
    assert 0 <= home < count
    assert later == home or later >= count


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (3, 1), (4, 3), (16, 15), (200, 64)])
def test_a_new_directory_gets_as_many_workers_as_the_machine_has_room_for(
    tmp_path: Path, cores: int, workers: int
) -> None:
    assert choose_worker_count(Settings(data_dir=tmp_path), cores) == workers
    assert choose_worker_count(Settings(data_dir=tmp_path, workers=2), cores) == 2


def test_a_directory_in_use_keeps_its_number_where_none_is_given(tmp_path: Path) -> None:
    (tmp_path / "hot.db").touch()
    assert choose_worker_count(Settings(data_dir=tmp_path), 16) == 1
    write_layout(tmp_path, Layout(workers=5, generation=1))
    assert choose_worker_count(Settings(data_dir=tmp_path), 16) == 5


def test_names_are_spread_evenly() -> None:
    placement = Placement(4)
    homes = [placement.owner(f"stream/{number}") for number in range(4000)]
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
        assert placement.owner(name) == 0
    for worker in range(1, 4):
        assert placement.owner("__registry__" + system_stream_suffix(worker)) == worker


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
        assert stream_in_path(b"/v1/stream/" + path) == name
    assert stream_in_path(b"/v1/stream/a/_schema", whole=True) == "a/_schema"


def test_who_may_wait_is_waited_for() -> None:
    assert owner_wait_s(b"/v1/stream/a") == 0
    assert owner_wait_s(b"/v1/stream/a/touch/wait") == TOUCH_S_MAX
    assert owner_wait_s(b"/hub/messages") == inf


def test_metrics_of_workers_become_one_text() -> None:
    one = '# HELP a A.\n# TYPE a counter\na 1.0\n# HELP b B.\n# TYPE b gauge\nb{mode="x"} 2.0\n'
    text = merge_metrics({0: one, 2: one})
    assert text.splitlines() == [
        *("# HELP a A.", "# TYPE a counter", 'a{worker="0"} 1.0', 'a{worker="2"} 1.0'),
        *("# HELP b B.", "# TYPE b gauge", 'b{worker="0",mode="x"} 2.0', 'b{worker="2",mode="x"} 2.0'),
    ]


def test_numbers_add_up_and_settings_do_not() -> None:
    part = {
        "configured_limits": {"x": 5},
        "runtime": {"n": 2, "on": False, "top": [1], "at": "now", "no": None, "b": "7", "oldest_ms": "12"},
    }
    other = {
        "configured_limits": {"x": 5},
        "runtime": {"n": 3, "on": True, "top": [2], "at": "then", "no": None, "b": "8", "oldest_ms": "9"},
    }
    assert merge_json([part, other]) == {
        "configured_limits": {"x": 5},
        "runtime": {
            "n": 5,
            "on": True,
            "top": [1, 2],
            "at": "now",
            "no": None,
            "b": "15",
            "oldest_ms": "12",
        },
    }


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), unique=True), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(0, 2),
)
def test_pages_of_all_plans_have_every_stream_once_and_in_order(
    work: list[list[tuple[int, int]]], limit: int, idle: int
) -> None:
    """Also if some of what a worker has is not of the kind that was asked for."""
    works = {worker: sorted(places) for worker, places in enumerate(work)}

    def wanted(worker: int, place: tuple[int, int]) -> bool:
        return idle == 0 or (place[1] + worker) % (idle + 1) > 0

    def page(worker: int, after: str) -> PlanPart:
        oldest, _, number = after.partition(".")
        behind = (int(oldest), int(number)) if after else (-1, -1)
        found = [place for place in works[worker] if place > behind][:limit]
        shown = [
            {"at": (place[0], worker, place[1]), "place": f"{place[0]}.{place[1]}"}
            for place in found
            if wanted(worker, place)
        ]
        following = f"{found[-1][0]}.{found[-1][1]}" if len(found) == limit else None
        return PlanPart(1, "", shown, following)

    seen: list[tuple[int, int, int]] = []
    after: str | None = ""
    while after is not None:
        begin = page_starts(after, works)
        streams, after = merge_plans({worker: page(worker, begin[worker]) for worker in works}, limit)
        assert len(streams) <= limit
        seen += [stream["at"] for stream in streams]
    every = [
        (oldest, worker, number)
        for worker, places in works.items()
        for oldest, number in places
        if wanted(worker, (oldest, number))
    ]
    assert seen == sorted(every)


@pytest.mark.parametrize("after", ["x", "1.2", "1.2.3.4", "1.-2.0", f"1.{'2' * 70}.0"])
def test_a_place_that_no_answer_named(after: str) -> None:
    with pytest.raises(TailraceError, match="next_after"):
        page_starts(after, range(2))


RATES = {"ops": Rate(5, 10), "bytes": Rate(1000, 2000)}
SECOND_NS = 1_000_000_000


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, SECOND_NS)), max_size=60))
def test_workers_together_give_no_more_than_one_would(asks: list[tuple[int, int]]) -> None:
    """Whoever is asked: what is given is what a single bucket gives."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "rates"
        workers = [SharedTokenBuckets(path, RATES) for _ in range(3)]
        now_ns = 10 * SECOND_NS
        alone = TokenBuckets(RATES)
        for worker, passed_ns in asks:
            now_ns += passed_ns
            expected = alone.take("sub ada", "ops", now_ns)
            assert abs(workers[worker].take("sub ada", "ops", now_ns) - expected) <= 1
            assert workers[worker].take(f"sub {worker} {now_ns}", "ops", now_ns) == 0, "others are others"


def test_what_is_larger_than_the_bound_is_paid_for_afterwards(tmp_path: Path) -> None:
    one, other = (SharedTokenBuckets(tmp_path / "rates", RATES) for _ in range(2))
    assert one.take("sub ada", "bytes", SECOND_NS, 50_000) == 0
    assert other.take("sub ada", "bytes", SECOND_NS, 1) == 48_001
    assert other.take("sub ada", "bytes", 60 * SECOND_NS, 2000) == 0
    assert one.take("sub ada", "bytes", 60 * SECOND_NS, 1) == 1
    for _ in range(10):
        assert one.take("sub ada", "ops", SECOND_NS) == 0
    assert other.take("sub ada", "ops", SECOND_NS) == 200
    other.give_back("sub ada", "ops")
    assert one.take("sub ada", "ops", SECOND_NS) == 0


def test_there_is_room_for_many_identities(tmp_path: Path) -> None:
    """More than there are slots: those that rest make room, and nobody is refused for another."""
    one, other = (SharedTokenBuckets(tmp_path / "rates", RATES) for _ in range(2))
    for number in range(SLOTS + 5000):
        assert (one, other)[number % 2].take(f"sub {number}", "ops", SECOND_NS + number * 10**6) == 0
