"""Memory: how much the process may use, the presets of `--auto-tune`, and malloc tuning (glibc only)."""

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
    "pipeline_heap": (512, 512, 1024, 1024, 2048, 4096),  # a separate process, not part of the preset's size
    "memory_limit_bytes": PRESETS_MB,
}
TUNED_SEARCH_CONCURRENCY: Final = (1, 2, 4, 8, 16, 32)  # and at most two for each core
TUNED_BODY_MB: Final = (10, 16, 32, 64, 64, 64)  # largest append
_OFF: Final = frozenset({"", "no", "off", "false", "0"})
_ON: Final = frozenset({"yes", "on", "true"})
_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")


def requested_mb(text: str) -> int | None:
    """The requested size in MB, the machine's for `yes`; None if tuning is off."""
    word = text.strip().lower()
    if word in _OFF:
        return None
    if word in _ON:
        return available_memory_bytes() // MIB
    if not word.isascii() or not word.isdigit():
        raise ValueError(f"{text!r} must be a size in MB, yes or no")
    return int(word)


def largest_preset_mb(size_mb: int) -> int:
    """The largest preset that fits."""
    fitting = [preset for preset in PRESETS_MB if preset <= size_mb]
    if not fitting:
        raise ValueError(f"{size_mb} MB is below the smallest preset, {PRESETS_MB[0]} MB")
    return fitting[-1]


def tuned_settings(preset: int, append_body_bytes: int | None = None) -> dict[str, int]:
    """The settings of a preset; they include the largest body unless it was chosen."""
    column = PRESETS_MB.index(preset)
    values = {name: sizes[column] * MIB for name, sizes in TUNED_SETTINGS_MB.items()}
    # One stream may use a quarter of the queue, and always has space for one body of the largest size.
    values["search_concurrency"] = min(TUNED_SEARCH_CONCURRENCY[column], 2 * (os.cpu_count() or 1))
    if append_body_bytes is None:
        append_body_bytes = values["append_body_bytes"] = TUNED_BODY_MB[column] * MIB
    values["append_queue_stream_bytes"] = max(values["append_queue_max_bytes"] // 4, append_body_bytes)
    return values


def available_memory_bytes() -> int:
    """Memory that this process may use: the control group's limit, otherwise all physical memory."""
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
        # In a container the path may be the host's, of which only a part is mounted.
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
    """Use fewer malloc arenas; must be called before there are many threads.

    By default there are eight arenas for each core, and memory that one thread freed cannot be reused by the
    others. Because of the interpreter lock there is little contention in the allocator.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_ARENA_MAX, MALLOC_ARENAS_MAX)


def trim_malloc() -> None:
    """Return free memory to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
