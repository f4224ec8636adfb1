"""Names of all kinds: whatever somebody writes, it never leads to another collection's changes."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from tailrace.common.errors import TailraceError
from tailrace.watch import names
from tailrace.watch.realtime.subscription import MessageRefusedError, read_positions

SEGMENTS = st.sampled_from(
    [
        "a",
        "b",
        "0",
        "1",
        "15",
        "..",
        ".",
        "",
        "pk",
        "touch",
        "_",
        "__changes__",
        "__audit__",
        "A.b-c_d",
        "a/b",
    ]
) | st.text(max_size=6)
PATHS = st.lists(SEGMENTS, min_size=1, max_size=5).map("/".join) | st.text(max_size=30)
DATABASES = st.sampled_from(["a", "b", "a-b", "default", "A", "", "a/b", "_", "__changes__"]) | st.text(
    max_size=5
)
KEYS = st.text(st.characters(), max_size=20)


def stream_of(database: str, collection: str, key: str, partitions: int) -> str | None:
    """Where a change of the document goes; None if there is no such place."""
    try:
        names.check_database(database)
        names.check_collection(collection)
    except TailraceError:
        return None
    partition = names.partition_for_key(key, partitions)
    assert 0 <= partition < partitions
    return names.change_stream_name(database, collection, partition)


@given(DATABASES, PATHS, KEYS, st.integers(1, names.PARTITIONS_MAX))
def test_w5_a_stream_says_whose_it_is(database: str, collection: str, key: str, partitions: int) -> None:
    stream = stream_of(database, collection, key, partitions)
    if stream is None:
        return
    assert stream.startswith(names.CHANGES_PREFIX)
    owner, _, rest = stream.removeprefix(names.CHANGES_PREFIX).partition("/")
    path, _, partition = rest.rpartition("/")
    assert (owner, path) == (database, collection)
    assert 0 <= int(partition) < partitions


@given(PATHS, PATHS, KEYS, KEYS)
def test_w5_two_collections_share_no_stream(one: str, other: str, key: str, other_key: str) -> None:
    streams = [stream_of("a", one, key, 16), stream_of("a", other, other_key, 16)]
    if one != other and None not in streams:
        assert streams[0] != streams[1]


@given(
    st.dictionaries(
        st.integers(-300, 300).map(str) | st.text(max_size=4), st.integers(-5, 2**64) | st.text(max_size=2)
    ),
    st.integers(1, names.PARTITIONS_MAX),
)
def test_w5_positions_are_of_partitions_that_there_are(given_: dict[str, object], partitions: int) -> None:
    found: dict[int, int] = {}
    with suppress(MessageRefusedError):
        found = read_positions(given_, partitions)
    assert all(0 <= partition < partitions for partition in found)
