"""Follow a stream and go on after a restart where the last run stopped.

    python examples/follow_and_resume.py http://127.0.0.1:4437 orders/today orders.offset

The position is stored after the work is done, so a crash in between repeats a page and never skips one. For
exactly once, store the position in the same transaction as the result of the work.
"""
# ruff: noqa: INP001, T201 - a script, and printing is its work

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from tailrace.client import Client

FROM_THE_START = "-1"


def load(file: Path) -> str:
    return file.read_text() if file.exists() else FROM_THE_START


def store(file: Path, offset: str) -> None:
    # Replaced in one step: a crash leaves the old position or the new one, never half of one.
    draft = file.with_suffix(".new")
    draft.write_text(offset)
    draft.replace(file)


def main(base_url: str, name: str, file: Path) -> None:
    with Client(base_url) as client, client.stream(name).follow(load(file), mode="sse") as pages:
        for page in pages:
            for entry in page.entries:
                print(entry, flush=True)
            store(file, page.next_offset)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the server")
    parser.add_argument("stream")
    parser.add_argument("file", type=Path, help="where the position is kept")
    given = parser.parse_args()
    main(given.url, given.stream, given.file)
