"""The server of the suite's own tests: the one that users get, made ready for a thousand starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.forked import ForkedCommand
from support.ports import KeptPort
from tailrace.testing import Process, TailraceServer

# Tests run side by side: what takes seconds on a busy machine is not what they are about. A journal of the
# usual size is 64 MiB of zeros, for each of a thousand servers. Before a bootstrap there is no living server.
HURRY = {
    "TAILRACE_REQUEST_MS": "60000",
    "TAILRACE_APPEND_MS": "30000",
    "TAILRACE_JOURNAL_FILE_BYTES": "2MiB",
    "TAILRACE_BOOTSTRAP_SETTLE_MS": "1",
}


class ServerProcess(TailraceServer):
    """One ``tailrace serve``, forked off a process that has loaded it, on a port that nobody else gets."""

    start_s_max = 60.0
    stop_s_max = 60.0

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int = 0,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        plain: bool = False,
    ) -> None:
        """`plain` is as users start it, with a fresh interpreter and every default."""
        self._kept = None if port else KeptPort()
        super().__init__(data_dir, port=self._kept.number if self._kept else port, args=args, env=env)
        self.plain = plain

    def environment(self) -> dict[str, str]:
        found = super().environment()
        return found if self.plain else {**found, **HURRY, **self.env}

    def launch(self, cwd: Path, output: int) -> Process:
        if self.plain:
            return super().launch(cwd, output)
        with Path(os.devnull).open("rb") as nothing:
            streams = (nothing.fileno(), output, output)
            return ForkedCommand(self.arguments(), env=self.environment(), cwd=cwd, streams=streams)
