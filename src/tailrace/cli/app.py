"""The tree of commands. Commands are named by import path, so that ``--help`` loads none of them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Final

from cyclopts import App, Group

from tailrace import __version__

_SERVER: Final = Group("Server", sort_key=1)
_STREAMS: Final = Group("Streams", sort_key=2)
_MAINTENANCE: Final = Group("Care", sort_key=3)

_HELP: Final = """A durable stream server and the tools around it.

Start a server with `tailrace serve`, then in another terminal:

    tailrace append orders '{"id": 1}' --create

    tailrace read orders

    tailrace tail orders --from-start

Exit codes: 0 done, 1 refused or not found, 2 wrong usage, 3 partial answer, 4 no server answers, 130 Ctrl-C.

`tailrace completion bash` (or zsh, fish) prints a script that completes commands and flags.
"""

_COMMANDS: Final = (
    ("serve", "Start a server.", _SERVER),
    ("edge", "Hold the clients of a server.", _SERVER),
    ("create", "Create a stream.", _STREAMS),
    ("append", "Append entries to a stream.", _STREAMS),
    ("read", "Read a stream up to its tail.", _STREAMS),
    ("tail", "Follow a stream live.", _STREAMS),
    ("ls", "List streams.", _STREAMS),
    ("fork", "Begin a stream with the entries of another.", _STREAMS),
    ("close", "Close a stream, so that nothing can be appended any more.", _STREAMS),
    ("rm", "Delete streams.", _STREAMS),
    ("search", "Find records of a stream.", _STREAMS),
    ("aggregate", "Add up records of a stream, over time and by group.", _STREAMS),
    ("sql", "Ask streams questions in SQL, with Spark.", _STREAMS),
    ("profile", "Show and change what the records of a stream mean.", _STREAMS),
    ("details", "Show what the server knows about a stream, or about itself.", _STREAMS),
    ("schema", "Show and change what the records of a stream look like.", _STREAMS),
    ("docs", "Read, write and query documents.", _STREAMS),
    ("watch", "Watch a query: what matches, and every change of it.", _STREAMS),
    ("hub", "Talk to actors, and look after their messages.", _STREAMS),
    ("source", "Follow databases outside, so that their tables become collections.", _STREAMS),
    ("seal", "Move streams to the object store now.", _MAINTENANCE),
    ("pipeline", "Look after the pipeline that builds indexes, or run one.", _MAINTENANCE),
    ("inspect", "Print what the files of a data directory hold.", _MAINTENANCE),
    ("verify", "Check that a data directory and its object store are as they were recorded.", _MAINTENANCE),
    ("salvage", "Copy what can be read of a damaged data directory into a new one.", _MAINTENANCE),
    ("gc", "Delete what no manifest in the object store names any more.", _MAINTENANCE),
    ("doctor", "Check that this machine can run a server well.", _MAINTENANCE),
    ("token", "Create, inspect and revoke access tokens.", _MAINTENANCE),
    ("key", "Create, list and revoke API keys.", _MAINTENANCE),
    ("completion", "Print the completion script of a shell.", _MAINTENANCE),
)

VERBS: Final = tuple(verb for verb, _summary, _group in _COMMANDS)


def build(arguments: Sequence[str]) -> App:
    """The command line as one object; only the verb that `arguments` ask for is imported."""
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
