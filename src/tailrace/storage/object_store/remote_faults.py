"""What went wrong at a bucket, and how long to be patient about it.

The library's errors are read here and nowhere else. It says only in words which status a server answered
with, so the words are looked at; what has no status never got an answer.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from enum import Enum
from typing import Final

from obstore.exceptions import (
    AlreadyExistsError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)

from tailrace.common.limits import Limits
from tailrace.storage.object_store.objects import ObjectStoreRefusedError, ObjectStoreUnavailableError

logger = logging.getLogger("tailrace.store")

PAUSE_MS_MAX: Final = 5000
MESSAGE_CHARS_MAX: Final = 500

_STATUS: Final = re.compile(r"non-2xx status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
# Answered with 400, but all of them mean that the request was hurt on its way.
_DAMAGED_CODES: Final = frozenset(
    {"RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch"}
)
_RETRY_STATUS: Final = frozenset({408, 425, 429})
_METADATA_HOSTS: Final = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")


class Fault(Enum):
    MISSING = "missing"  # no such object
    TAKEN = "taken"  # the object exists
    CHANGED = "changed"  # the object is another version
    BUSY = "busy"  # somebody writes the object right now; or it exists, some stores say it this way
    PASSING = "passing"  # trying again may help, and the request may have been carried out
    REFUSED = "refused"  # trying again does not help


def classify_error(error: Exception) -> Fault:
    text = str(error)
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0
    code = match[1] if (match := _CODE.search(text)) else ""
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return Fault.REFUSED
    if isinstance(error, FileNotFoundError):
        return Fault.MISSING
    if isinstance(error, AlreadyExistsError | PreconditionError):
        if status == 409:
            return Fault.BUSY
        return Fault.TAKEN if isinstance(error, AlreadyExistsError) else Fault.CHANGED
    if isinstance(error, _REFUSALS):
        return Fault.REFUSED
    if 300 <= status < 500 and status not in _RETRY_STATUS and code not in _DAMAGED_CODES:
        return Fault.REFUSED
    return Fault.REFUSED if status == 501 else Fault.PASSING


def is_beyond_end(error: Exception) -> bool:
    """Whether the range that was asked for begins behind the object's end."""
    found = _STATUS.search(str(error))
    return found[1] == "416" if found else "Wanted range starting at" in str(error)


_REFUSALS: Final = (
    PermissionDeniedError,
    UnauthenticatedError,
    NotSupportedError,
    InvalidPathError,
    UnknownConfigurationKeyError,
    RuntimeError,  # what the library raises for a condition that a store does not know
    ValueError,
    TypeError,
)


def describe_error(error: Exception) -> str:
    """The error in one line: the library adds pages of its inside, and answers have bodies."""
    text = str(error).split("\n\nDebug source:")[0]
    code = match[1] if (match := _CODE.search(text)) else ""
    text = text.split("<?xml")[0].strip().rstrip(":")
    hint = ""
    if any(host in text for host in _METADATA_HOSTS):
        hint = "; no keys are in the environment, so this machine's own were asked for"
    return f"{text[:MESSAGE_CHARS_MAX]}{f' ({code})' if code else ''}{hint}" or type(error).__name__


def refused_error(url: str, key: str, error: Exception) -> ObjectStoreRefusedError:
    return ObjectStoreRefusedError(key, f"{url} refuses us: {describe_error(error)}")


class RetryBudget:
    """How often and how long one call is tried: a deadline, a number of tries, and pauses between them."""

    def __init__(self, url: str, key: str, limits: Limits) -> None:
        self._url = url
        self._key = key
        self._limits = limits
        self._deadline_s = time.monotonic() + limits.object_ms / 1000
        self.tries = 0

    @property
    def left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    async def wait(self, error: Exception) -> None:
        """Pause before the next try, or give up with what happened last.

        The pause is random between nothing and a bound that doubles, so that many callers who failed
        together do not come back together.
        """
        self.tries += 1
        bound_ms = min(PAUSE_MS_MAX, self._limits.object_retry_ms * 2 ** min(self.tries - 1, 20))
        pause_s = random.uniform(bound_ms / 10, bound_ms) / 1000  # noqa: S311 - no secret
        if self.tries >= self._limits.object_tries or pause_s >= self.left_s:
            raise self.exhausted(error) from error
        logger.debug("object store: %s: try %d failed: %s", self._key, self.tries, describe_error(error))
        await asyncio.sleep(pause_s)

    def exhausted(self, error: Exception) -> ObjectStoreUnavailableError:
        tries = f"{self.tries} {'try' if self.tries == 1 else 'tries'}"
        reason = "no answer in time" if isinstance(error, TimeoutError) else describe_error(error)
        return ObjectStoreUnavailableError(self._key, f"{self._url} cannot be used, after {tries}: {reason}")
