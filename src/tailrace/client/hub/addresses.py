"""Addresses as other runtimes write them, and back."""

from __future__ import annotations

from typing import Final, Literal

from tailrace.hub.addresses import format_address, parse_address

Runtime = Literal["browser", "cloudflare", "local", "seag", "beam"]

# The first is what is written, all are understood.
_PREFIXES: Final[dict[Runtime, tuple[str, ...]]] = {
    "browser": ("local://",),
    "cloudflare": ("remote://do/", "remote://worker/", "worker://", "do://"),
    "beam": ("",),
    "local": (),
    "seag": (),
}


def to_runtime(address: str, runtime: Runtime) -> str:
    """An address of the hub as a runtime writes it: `local://w-1` in a browser for `@(w-1)`."""
    path = parse_address(address, "address")
    prefixes = _PREFIXES[runtime]
    return prefixes[0] + path if prefixes else address


def from_runtime(text: str, runtime: Runtime) -> str:
    """The hub's address for one that a runtime wrote. The hub's own form is understood everywhere."""
    if not text.startswith("@("):
        for prefix in _PREFIXES[runtime]:
            if text.startswith(prefix):
                text = format_address(text.removeprefix(prefix))
                break
    parse_address(text, "address")
    return text
