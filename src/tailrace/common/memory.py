"""Memory of this machine: what the process may use, the presets of --auto-tune, and malloc tuning.

`--auto-tune`: memory settings chosen together, from what the machine or the control group has.

The C library's memory: how many places it takes it from, and giving back what is free.

Both are calls of glibc. Elsewhere nothing happens, and nothing depends on it.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

from tailrace.common.limits import MIB

PRESETS_MB: Final = (256, 512, 1024, 2048, 4096, 8192)

# Setting to its values in MiB, one for each preset.
TUNED_SETTINGS_MB: Final[dict[str, tuple[int, ...]]] = {
    "tail_memory_max_bytes": (32, 64, 128, 256, 512, 1024),
    "tail_index_max_bytes": (32, 64, 128, 256, 512, 1024),
    "sqlite_cache_bytes": (16, 32, 64, 128, 256, 512),
    "append_queue_max_bytes": (16, 32, 64, 128, 256, 256),
    "segment_cache_max_bytes": (256, 512, 1024, 2048, 4096, 8192),
    "search_companion_memory_max_bytes": (16, 32, 64, 128, 512, 1024),
    "search_companion_file_cache_max_bytes": (128, 256, 512, 1024, 2048, 4096),
    "pipeline_heap": (512, 512, 1024, 1024, 2048, 4096),  # a process of its own, beside the preset
    "memory_limit_bytes": PRESETS_MB,
}
TUNED_SEARCH_CONCURRENCY: Final = (1, 2, 4, 8, 16, 32)  # at once, and never more than two for each core
TUNED_BODY_MB: Final = (10, 16, 32, 64, 64, 64)  # MiB of one append
_OFF: Final = frozenset({"", "no", "off", "false", "0"})
_ON: Final = frozenset({"yes", "on", "true"})
_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")


def requested_mb(text: str) -> int | None:
    """The size that was asked for in MB, the machine's if only `yes` was said; None if tuning is off."""
    word = text.strip().lower()
    if word in _OFF:
        return None
    if word in _ON:
        return available_memory_bytes() // MIB
    if not word.isascii() or not word.isdigit():
        raise ValueError(f"{text!r} is neither a size in MB nor yes or no")
    return int(word)


def largest_preset_mb(size_mb: int) -> int:
    """The largest preset that fits."""
    fitting = [preset for preset in PRESETS_MB if preset <= size_mb]
    if not fitting:
        raise ValueError(f"{size_mb} MB is less than {PRESETS_MB[0]} MB, the smallest preset")
    return fitting[-1]


def tuned_settings(preset: int, append_body_bytes: int | None = None) -> dict[str, int]:
    """The settings of a preset; the largest body is one of them unless it was chosen."""
    column = PRESETS_MB.index(preset)
    values = {name: sizes[column] * MIB for name, sizes in TUNED_SETTINGS_MB.items()}
    # One stream may take a quarter of the queue, and always one body of the largest size.
    values["search_concurrency"] = min(TUNED_SEARCH_CONCURRENCY[column], 2 * (os.cpu_count() or 1))
    if append_body_bytes is None:
        append_body_bytes = values["append_body_bytes"] = TUNED_BODY_MB[column] * MIB
    values["append_queue_stream_bytes"] = max(values["append_queue_max_bytes"] // 4, append_body_bytes)
    return values


def available_memory_bytes() -> int:
    """The memory this process may use: the control group's limit, else all there is."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = cgroup_memory_limit_bytes()
    return physical if limit is None else min(limit, physical)


def cgroup_memory_limit_bytes(root: Path = _CGROUP_ROOT, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The memory limit of the control group, either version; None if there is none."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    found: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        # In a container the path may be one of the host's, of which only the end of the tree is mounted.
        for folder in (top / path.strip("/"), top):
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit() and int(text) < 1 << 60:
                found.append(int(text))
    return min(found, default=None)


MALLOC_ARENAS_MAX: Final = 2
_M_ARENA_MAX: Final = -8


def limit_malloc_arenas() -> None:
    """To be called before there are many threads.

    By default every thread gets an arena of its own, eight for each core, and what one thread frees is of no
    use to the others. With one interpreter lock the threads hardly meet in the allocator.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_ARENA_MAX, MALLOC_ARENAS_MAX)


def trim_malloc() -> None:
    """Memory that was freed goes back to the system: whole pages, wherever they lie."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
