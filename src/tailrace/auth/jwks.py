"""Public keys that verify tokens (JWKS): parsed, bound to one algorithm each, refreshed in the background.

The type of a key determines its only algorithm, so a token cannot choose how it is verified. A separate
thread fetches the keys, so that a slow key server delays only new keys.
"""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import logging
import ssl
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec
from jwt import PyJWK
from jwt.exceptions import PyJWTError

from tailrace.common.backoff import backoff_delay
from tailrace.common.clock import SYSTEM_CLOCK, Clock
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields

DOCUMENT_BYTES_MAX: Final = 256 * 1024
KEYS_MAX: Final = 256
FETCH_TIMEOUT_S: Final = 5.0
REFRESH_S: Final = 300.0
REFRESH_AFTER_FAILURE_S: Final = 15.0
# An unknown key id triggers a refresh at most this often, so that forged ids do not load the issuer.
REFRESH_INTERVAL_S_MIN: Final = 10.0
# Each failure doubles the pause before the next attempt, up to this.
REFRESH_INTERVAL_S_MAX: Final = 60.0
RSA_BITS_MIN: Final = 2048

# (kty, crv) -> the only algorithm for such a key. Symmetric keys are not accepted in a public set.
_ALGORITHM_BY_KEY_TYPE: Final[dict[tuple[str, str | None], str]] = {
    ("RSA", None): "RS256",
    ("EC", "P-256"): "ES256",
    ("OKP", "Ed25519"): "EdDSA",
}
ALGORITHMS: Final = frozenset(_ALGORITHM_BY_KEY_TYPE.values())

logger = logging.getLogger("tailrace.auth")


class BoundKey(NamedTuple):
    """A key, and a fingerprint that identifies its material."""

    key: PyJWK
    fingerprint: str


class KeySet:
    """The usable keys of one document, found by algorithm and key id."""

    __slots__ = ("_by_id", "_single", "fingerprints", "size")

    def __init__(self, keys: Mapping[tuple[str, str | None], BoundKey]) -> None:
        self._by_id = dict(keys)
        self.size = len(self._by_id)
        self.fingerprints = frozenset(key.fingerprint for key in keys.values())
        by_algorithm: dict[str, list[BoundKey]] = {}
        for (algorithm, _), key in self._by_id.items():
            by_algorithm.setdefault(algorithm, []).append(key)
        # A token without a key id is verified only if there is exactly one candidate.
        self._single = {name: found[0] for name, found in by_algorithm.items() if len(found) == 1}

    def find(self, algorithm: str, key_id: str | None) -> BoundKey | None:
        if key_id is None:
            return self._single.get(algorithm)
        return self._by_id.get((algorithm, key_id))


def parse_key_set(document: bytes) -> KeySet:
    """The keys of a JWKS document; ValueError if it is invalid or contains no usable key."""
    try:
        decoded: Any = msgspec.json.decode(document)
    except msgspec.DecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    keys: Any = cast("dict[str, Any]", decoded).get("keys") if isinstance(decoded, dict) else None
    if not isinstance(keys, list):
        raise ValueError("a key set must be an object with a list 'keys'")  # noqa: TRY004 (content, not a type)
    usable: dict[tuple[str, str | None], BoundKey] = {}
    for item in cast("list[Any]", keys)[:KEYS_MAX]:
        if isinstance(item, dict) and (bound := _bind(cast("dict[str, Any]", item))) is not None:
            usable.setdefault(bound[0], bound[1])
    if not usable:
        raise ValueError("no usable key: RSA (2048 bits or more), EC P-256 or OKP Ed25519 for signatures")
    return KeySet(usable)


def _bind(data: dict[str, Any]) -> tuple[tuple[str, str | None], BoundKey] | None:
    """Bind a key to its algorithm; None if its type, use or strength is not accepted."""
    kind = data.get("kty")
    curve = None if kind == "RSA" else data.get("crv")
    if not isinstance(kind, str) or not (curve is None or isinstance(curve, str)):
        return None
    algorithm = _ALGORITHM_BY_KEY_TYPE.get((kind, curve))
    key_id = data.get("kid")
    operations = data.get("key_ops")
    if (
        algorithm is None
        or data.get("alg", algorithm) != algorithm
        or data.get("use", "sig") != "sig"
        or not (key_id is None or isinstance(key_id, str))
        or (isinstance(operations, list) and "verify" not in operations)
    ):
        return None
    try:
        key = PyJWK(data, algorithm)
    except (PyJWTError, ValueError, TypeError, KeyError):
        return None
    if kind == "RSA" and key.key.key_size < RSA_BITS_MIN:
        return None
    material = {name: data.get(name) for name in ("kty", "crv", "n", "e", "x", "y")}
    fingerprint = hashlib.sha256(msgspec.json.encode(material)).hexdigest()[:32]
    return (algorithm, key_id), BoundKey(key, fingerprint)


def read_file(path: str) -> bytes:
    with Path(path).open("rb") as file:
        document = file.read(DOCUMENT_BYTES_MAX + 1)
    if len(document) > DOCUMENT_BYTES_MAX:
        raise ValueError(f"larger than {DOCUMENT_BYTES_MAX} bytes")
    return document


def check_url(url: str, *, insecure: bool) -> None:
    """Require https, or http to this machine: keys fetched over plain http could be forged."""
    parts = urlsplit(url)
    if parts.username is not None:
        raise TailraceError("invalid_request", "the key set URL must not contain a user name or password")
    if parts.scheme == "https" and parts.hostname:
        return
    if parts.scheme == "http" and parts.hostname and (insecure or _is_loopback(parts.hostname)):
        return
    raise TailraceError(
        "invalid_request",
        f"the key set URL {url!r} must be https (http only to this machine, or with --insecure)",
    )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def fetch(url: str, *, timeout_s: float = FETCH_TIMEOUT_S, clock: Clock = SYSTEM_CLOCK) -> bytes:
    """One GET, no redirects, bounded in time and size. Raises OSError or ValueError."""
    parts = urlsplit(url)
    assert parts.hostname is not None, "checked when the settings were read"
    deadline = clock.monotonic() + timeout_s
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=timeout_s, context=context
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request("GET", target, headers={"Accept": "application/json, application/jwk-set+json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"unexpected status {response.status}")
        document = bytearray()
        # The socket timeout is per read; the deadline stops a server that sends very slowly.
        while piece := response.read1(65536):
            document += piece
            if len(document) > DOCUMENT_BYTES_MAX:
                raise ValueError(f"larger than {DOCUMENT_BYTES_MAX} bytes")
            if clock.monotonic() > deadline:
                raise TimeoutError(f"not complete within {timeout_s:g} s")
        return bytes(document)
    except http.client.HTTPException as error:
        raise ValueError(f"invalid HTTP response: {error!r}") from None
    finally:
        connection.close()


class KeyRing:
    """The current key set and the thread that refreshes it. Lookups never block."""

    def __init__(self, load: Callable[[], bytes], origin: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._load = load
        self._origin = origin
        self._clock = clock
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._refreshing = False
        self._requested = False
        self._forced = False
        self._closing = False
        self._tried_at: float | None = None
        self._failures = 0  # since the last successful refresh
        self._document: bytes | None = None
        self._keys = KeySet({})
        self.version = 0

    @property
    def loaded(self) -> bool:
        return self.version > 0

    def find(self, algorithm: str, key_id: str | None) -> BoundKey | None:
        return self._keys.find(algorithm, key_id)

    def has(self, fingerprint: str) -> bool:
        return fingerprint in self._keys.fingerprints

    def load_now(self) -> None:
        """Load in the caller's thread and raise any error: a key file must be valid at start."""
        self._tried_at = self._clock.monotonic()
        self._apply(self._load())

    def start(self) -> None:
        """Start refreshing; the first load is in progress when this returns."""
        assert self._thread is None, "started twice"
        self._refreshing = not self.loaded
        self._thread = threading.Thread(target=self._run, name="tailrace-jwks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(FETCH_TIMEOUT_S + 1)

    def request_refresh(self) -> bool:
        """Refresh the keys unless that was done recently; True while a refresh is in progress."""
        with self._changed:
            if self._thread is None or self._closing:
                return False
            recent = (
                self._tried_at is not None
                and self._clock.monotonic() - self._tried_at < self._interval_s_min()
            )
            if not self._refreshing and not recent:
                self._requested = self._refreshing = True
                self._changed.notify_all()
            return self._refreshing

    def reload(self) -> None:
        """Refresh the keys regardless of the last refresh, because an operator requested it."""
        with self._changed:
            if self._thread is not None and not self._closing:
                self._requested = self._forced = self._refreshing = True
                self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait for a refresh in progress; False if it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._refreshing, timeout_s)

    def _run(self) -> None:
        due = self._refreshing
        while True:
            if due:
                self._refresh()
            with self._changed:
                if due:
                    # Requests during the refresh are done with it, except a forced one.
                    self._refreshing = self._requested = self._forced
                    self._changed.notify_all()
                pause_s = self._pause_s()
                self._changed.wait_for(lambda: self._requested or self._closing, pause_s)
                if self._closing:
                    return
                due = self._refreshing = True
                self._forced = False

    def _interval_s_min(self) -> float:
        return backoff_delay(self._failures + 1, REFRESH_INTERVAL_S_MIN, REFRESH_INTERVAL_S_MAX)

    def _pause_s(self) -> float:
        """Pause before the next refresh; shorter after a failure."""
        if not self._failures:
            return REFRESH_S
        return backoff_delay(self._failures, REFRESH_AFTER_FAILURE_S, REFRESH_S)

    def _refresh(self) -> None:
        self._tried_at = self._clock.monotonic()
        try:
            self._apply(self._load())
            self._failures = 0
        except Exception as error:  # noqa: BLE001 - the next refresh may succeed
            self._failures += 1
            # Current keys stay in use: an issuer that is down must not lock out all clients.
            logger.warning(
                "key set refresh failed, keeping the current keys",
                extra=log_fields(source=self._origin, keys=self._keys.size, error=str(error)),
            )

    def _apply(self, document: bytes) -> None:
        if document == self._document:
            return
        keys = parse_key_set(document)
        self._keys, self._document = keys, document
        self.version += 1
