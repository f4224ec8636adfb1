"""Waiting for the log, for those who have nothing else to do meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tailrace.common.errors import TailraceError
from tailrace.log.transaction import Reply, Transaction


async def await_commit(change: Callable[[Reply], object]) -> None:
    """Returns when the change is durable; raises what it was refused or failed with.

    `change` asks something of the log and hands it the reply: `partial(log.put_meta, key, value)`.
    """
    settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def reply(_: Transaction, error: TailraceError | None) -> None:
        if settled.done():
            return  # whoever waited has been cancelled
        if error is None:
            settled.set_result(None)
        else:
            settled.set_exception(error)

    change(reply)
    await settled
