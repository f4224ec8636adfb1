"""Finds a Java installation that Spark can use."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path
from typing import Final

VERSION_MIN: Final = 17
VERSION_TIMEOUT_S: Final = 20.0
_VERSION = re.compile(rb'version "(\d+)(?:\.(\d+))?')


async def find_java(*, check_version: bool = True) -> str | None:
    """`JAVA_HOME`, then the PATH. With `check_version` it is run to check that it is new enough."""
    home = os.environ.get("JAVA_HOME")
    places = [str(Path(home) / "bin" / "java")] if home else []
    on_path = shutil.which("java")
    places += [] if on_path is None else [on_path]
    for place in places:
        if not os.access(place, os.X_OK):
            continue
        if not check_version or (await java_version(place) or 0) >= VERSION_MIN:
            return place
    return None


async def java_version(place: str) -> int | None:
    """The feature release, such as 17; None if it is unknown."""
    try:
        child = await asyncio.create_subprocess_exec(
            place, "-version", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
    except OSError:
        return None
    try:
        async with asyncio.timeout(VERSION_TIMEOUT_S):
            _, output = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.wait()
        return None
    return parse_java_version(output)


def parse_java_version(output: bytes) -> int | None:
    """Parse `openjdk version "17.0.12" 2024-07-16`; versions up to 8 are written as 1.8."""
    found = _VERSION.search(output)
    if found is None:
        return None
    major = int(found[1])
    return int(found[2]) if major == 1 and found[2] else major
