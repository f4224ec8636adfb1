"""The tree of commands, named by import path so that ``--help`` loads none of them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Final

from cyclopts import App, Group

from tailrace import __version__

_SERVER: Final = Group("Server", sort_key=1)
_STREAMS: Final = Group("Streams", sort_key=2)
_MAINTENANCE: Final = Group("Maintenance", sort_key=3)

_HELP: Final = """A durable stream server and the tools around it.

Start a server with `tailrace serve`, then in another terminal:

    tailrace append orders '{"id": 1}' --create

    tailrace read orders

    tailrace tail orders --from-start

Exit codes: 0 done, 1 refused or not found, 2 wrong usage, 3 partial result, 4 server unreachable, 130 Ctrl-C.

`tailrace completion bash` (or zsh, fish) prints a script that completes commands and flags.
"""

_COMMANDS: Final = (
    ("serve", "Start a server.", _SERVER),
    ("edge", "Start an edge, which serves the clients of a server.", _SERVER),
    ("create", "Create a stream.", _STREAMS),
    ("append", "Append entries to a stream.", _STREAMS),
    ("read", "Read a stream up to its tail.", _STREAMS),
    ("tail", "Follow a stream live.", _STREAMS),
    ("ls", "List streams.", _STREAMS),
    ("fork", "Create a stream with the entries of another.", _STREAMS),
    ("close", "Close a stream for appends.", _STREAMS),
    ("rm", "Delete streams.", _STREAMS),
    ("search", "Search the records of a stream.", _STREAMS),
    ("aggregate", "Aggregate records of a stream over time and by group.", _STREAMS),
    ("sql", "Query streams in SQL, with Spark.", _STREAMS),
    ("profile", "Show and change the profile of a stream.", _STREAMS),
    ("details", "Show details of a stream or of the server.", _STREAMS),
    ("schema", "Show and change the schema of a stream.", _STREAMS),
    ("docs", "Read, write and query documents.", _STREAMS),
    ("watch", "Watch a live query: its result and every change.", _STREAMS),
    ("hub", "Send messages to actors, and manage mailboxes and dead letters.", _STREAMS),
    ("source", "Replicate tables of external databases into collections.", _STREAMS),
    ("seal", "Move streams to the object store now.", _MAINTENANCE),
    ("pipeline", "Manage the pipeline that builds index files, or run one.", _MAINTENANCE),
    ("inspect", "Print the contents of data directory and object store files.", _MAINTENANCE),
    ("verify", "Verify a data directory and its object store.", _MAINTENANCE),
    ("salvage", "Copy the readable data of a damaged data directory into a new one.", _MAINTENANCE),
    ("gc", "Delete unreferenced objects of the object store.", _MAINTENANCE),
    ("doctor", "Check that this machine can run a server well.", _MAINTENANCE),
    ("token", "Create, inspect and revoke access tokens.", _MAINTENANCE),
    ("key", "Create, list and revoke API keys.", _MAINTENANCE),
    ("completion", "Print the completion script of a shell.", _MAINTENANCE),
)

VERBS: Final = tuple(verb for verb, _summary, _group in _COMMANDS)


def build(arguments: Sequence[str]) -> App:
    """Build the command line; only the verb in `arguments` is imported."""
    app = App(
        name="tailrace", help=_HELP, version=__version__, result_action="return_value", help_format="markdown"
    )
    for verb, summary, group in _COMMANDS:
        if verb in arguments[:1]:
            module = importlib.import_module(f"tailrace.cli.{verb}")
            app.command(module.command_for(arguments[1:]) if verb == "serve" else module.command)
        else:
            app.command(f"tailrace.cli.{verb}:command", name=verb, help=summary, group=group)
    return app
