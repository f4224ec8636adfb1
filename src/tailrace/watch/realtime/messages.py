"""What realtime clients say, checked: options of a subscription, positions; and why something is refused."""

from __future__ import annotations

import re
from typing import Any, Final, cast

from tailrace.auth import Identity
from tailrace.watch import names
from tailrace.watch.realtime.subscription import PRIORITIES, SubscriptionOptions

UNACKED_MAX: Final = 10_000
_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}\Z")


class MessageRefusedError(Exception):  # noqa: N818 - not a defect
    """A message that is answered with an error."""

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.more = more


def check_subscription_id(given: object, what: str) -> str:
    """The id of a subscription."""
    if not isinstance(given, str) or not _ID.match(given):
        raise MessageRefusedError("bad_message", f"{what} is 1 to 64 of A-Z, a-z, 0-9, '_', '.', ':', '-'")
    return given


def default_database(identity: Identity) -> str | None:
    """The database that is meant when none is named."""
    if identity.anonymous:
        return names.DATABASE_DEFAULT
    return identity.dbs[0] if identity.dbs is not None and len(identity.dbs) == 1 else None


def read_options(payload: dict[str, Any], identity: Identity) -> SubscriptionOptions:
    options = SubscriptionOptions()
    truths = {"sendSnapshot": False, "includeData": True, "autoResync": False}
    found = {name: payload.get(name, default) for name, default in truths.items()}
    if not all(type(value) is bool for value in found.values()):
        raise MessageRefusedError("bad_message", "sendSnapshot, includeData and autoResync are true or false")
    options.snapshot, options.include_data = found["sendSnapshot"], found["includeData"]
    options.auto_resync = found["autoResync"]
    options.priority = payload.get("priority", "normal")
    if options.priority not in PRIORITIES:
        raise MessageRefusedError("bad_message", "priority is low, normal or high")
    if options.priority == "high" and not identity.anonymous and "manage" not in identity.scopes:
        raise MessageRefusedError("forbidden", "high priority needs the scope manage")
    unacked = payload.get("maxUnacked", 0)
    if type(unacked) is not int or not 0 <= unacked <= UNACKED_MAX:
        raise MessageRefusedError("bad_message", f"maxUnacked is a number from 0 to {UNACKED_MAX}")
    options.max_unacked = unacked
    return options


def read_positions(given: Any, partitions: int) -> dict[int, int]:
    """`{"10": 12345}`: the last that was applied, by partition."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise MessageRefusedError("bad_message", "positions is an object of numbers by partition")
    found: dict[int, int] = {}
    for key, seq in cast("dict[str, Any]", given).items():
        if not key.isascii() or not key.isdecimal() or len(key) > 3 or int(key) >= partitions:
            raise MessageRefusedError("invalid_partition", f"there is no partition {key[:20]!r}")
        if type(seq) is not int or not 0 <= seq < 2**63:
            raise MessageRefusedError("bad_message", "a position is a number")
        found[int(key)] = seq
    return found
