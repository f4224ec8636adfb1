"""Public keys that tokens are checked with: parsed, bound to one algorithm each, refreshed in the background.

A key's type decides the one algorithm it may be used with, so a token can never choose how it is checked.
Fetching happens on a thread of its own: a slow key server delays nothing but new keys.
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

from tailrace.common.clock import SYSTEM_CLOCK, Clock
from tailrace.common.errors import TailraceError

DOCUMENT_BYTES_MAX: Final = 256 * 1024
KEYS_MAX: Final = 256
FETCH_TIMEOUT_S: Final = 5.0
REFRESH_S: Final = 300.0
REFRESH_AFTER_FAILURE_S: Final = 15.0
DOUBLINGS_MAX: Final = 5
# An unknown key id makes us look for new keys at most this often, so that forged ids cost the issuer nothing.
REFRESH_INTERVAL_S_MIN: Final = 10.0
# Each failure doubles the pause before the next try, up to these.
REFRESH_INTERVAL_S_MAX: Final = 60.0
RSA_BITS_MIN: Final = 2048

# (kty, crv) -> the one algorithm such a key is good for. Symmetric keys have no place in a public set.
_ALGORITHM_OF: Final[dict[tuple[str, str | None], str]] = {
    ("RSA", None): "RS256",
    ("EC", "P-256"): "ES256",
    ("OKP", "Ed25519"): "EdDSA",
}
ALGORITHMS: Final = frozenset(_ALGORITHM_OF.values())

logger = logging.getLogger("tailrace.auth")


class BoundKey(NamedTuple):
    """A key, and a mark that stands for exactly this one."""

    key: PyJWK
    mark: str


class KeySet:
    """The usable keys of one document, found by algorithm and key id."""

    __slots__ = ("_by_id", "_lonely", "marks", "size")

    def __init__(self, keys: Mapping[tuple[str, str | None], BoundKey]) -> None:
        self._by_id = dict(keys)
        self.size = len(self._by_id)
        self.marks = frozenset(key.mark for key in keys.values())
        by_algorithm: dict[str, list[BoundKey]] = {}
        for (algorithm, _), key in self._by_id.items():
            by_algorithm.setdefault(algorithm, []).append(key)
        # A token without a key id is checked only where there is nothing to choose.
        self._lonely = {name: found[0] for name, found in by_algorithm.items() if len(found) == 1}

    def find(self, algorithm: str, key_id: str | None) -> BoundKey | None:
        if key_id is None:
            return self._lonely.get(algorithm)
        return self._by_id.get((algorithm, key_id))


def parse_key_set(document: bytes) -> KeySet:
    """The keys of a JWKS document; ValueError if it is none or holds no key that we can use."""
    try:
        decoded: Any = msgspec.json.decode(document)
    except msgspec.DecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    keys: Any = cast("dict[str, Any]", decoded).get("keys") if isinstance(decoded, dict) else None
    if not isinstance(keys, list):
        raise ValueError("a key set is an object with a list 'keys'")  # noqa: TRY004 (content, not a type)
    usable: dict[tuple[str, str | None], BoundKey] = {}
    for item in cast("list[Any]", keys)[:KEYS_MAX]:
        if isinstance(item, dict) and (bound := _bind(cast("dict[str, Any]", item))) is not None:
            usable.setdefault(bound[0], bound[1])
    if not usable:
        raise ValueError("no usable key: RSA (2048 bits or more), EC P-256 or OKP Ed25519 for signatures")
    return KeySet(usable)


def _bind(data: dict[str, Any]) -> tuple[tuple[str, str | None], BoundKey] | None:
    """Ties a key to its algorithm; None if it is of another kind, use or strength."""
    kind = data.get("kty")
    curve = None if kind == "RSA" else data.get("crv")
    if not isinstance(kind, str) or not (curve is None or isinstance(curve, str)):
        return None
    algorithm = _ALGORITHM_OF.get((kind, curve))
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
    mark = hashlib.sha256(msgspec.json.encode(material)).hexdigest()[:32]
    return (algorithm, key_id), BoundKey(key, mark)


def read_file(path: str) -> bytes:
    with Path(path).open("rb") as file:
        document = file.read(DOCUMENT_BYTES_MAX + 1)
    if len(document) > DOCUMENT_BYTES_MAX:
        raise ValueError(f"larger than {DOCUMENT_BYTES_MAX} bytes")
    return document


def check_url(url: str, *, insecure: bool) -> None:
    """Keys fetched in the clear could be anyone's: https, or http to this machine."""
    parts = urlsplit(url)
    if parts.username is not None:
        raise TailraceError(
            "invalid_request", "the key set URL holds a name or password, which nobody would be sent"
        )
    if parts.scheme == "https" and parts.hostname:
        return
    if parts.scheme == "http" and parts.hostname and (insecure or _is_loopback(parts.hostname)):
        return
    raise TailraceError(
        "invalid_request",
        f"the key set URL {url!r} must be https (http only to this machine, or anywhere with --insecure)",
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
            raise ValueError(f"answered {response.status}")
        document = bytearray()
        # The socket's own limit is per read: a server that drips bytes is stopped by the deadline.
        while piece := response.read1(65536):
            document += piece
            if len(document) > DOCUMENT_BYTES_MAX:
                raise ValueError(f"larger than {DOCUMENT_BYTES_MAX} bytes")
            if clock.monotonic() > deadline:
                raise TimeoutError(f"not complete within {timeout_s:g} s")
        return bytes(document)
    except http.client.HTTPException as error:
        raise ValueError(f"not an HTTP answer: {error!r}") from None
    finally:
        connection.close()


class KeyRing:
    """The current key set and the thread that keeps it so. Reading never waits."""

    def __init__(self, load: Callable[[], bytes], origin: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._load = load
        self._origin = origin
        self._clock = clock
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._refreshing = False
        self._asked = False
        self._insisted = False
        self._closing = False
        self._tried_at: float | None = None
        self._failures = 0  # since the last look that brought keys
        self._document: bytes | None = None
        self._keys = KeySet({})
        self.version = 0

    @property
    def loaded(self) -> bool:
        return self.version > 0

    def find(self, algorithm: str, key_id: str | None) -> BoundKey | None:
        return self._keys.find(algorithm, key_id)

    def has(self, mark: str) -> bool:
        return mark in self._keys.marks

    def load_now(self) -> None:
        """Loads in the caller's thread and raises what is wrong: a file has to be right at start."""
        self._tried_at = self._clock.monotonic()
        self._adopt(self._load())

    def start(self) -> None:
        """Begins to keep the keys fresh; the first load is under way when this returns."""
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

    def ask_refresh(self) -> bool:
        """Looks for new keys unless that was done a moment ago; True while a look is under way."""
        with self._changed:
            if self._thread is None or self._closing:
                return False
            recent = (
                self._tried_at is not None
                and self._clock.monotonic() - self._tried_at < self._interval_s_min()
            )
            if not self._refreshing and not recent:
                self._asked = self._refreshing = True
                self._changed.notify_all()
            return self._refreshing

    def reload(self) -> None:
        """Looks for new keys whenever the last look was: somebody knows that there are some."""
        with self._changed:
            if self._thread is not None and not self._closing:
                self._asked = self._insisted = self._refreshing = True
                self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits for a refresh in progress; False if it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._refreshing, timeout_s)

    def _run(self) -> None:
        due = self._refreshing
        while True:
            if due:
                self._refresh()
            with self._changed:
                if due:
                    # What was asked for while we looked has just been done, unless somebody insists.
                    self._refreshing = self._asked = self._insisted
                    self._changed.notify_all()
                pause_s = self._pause_s()
                self._changed.wait_for(lambda: self._asked or self._closing, pause_s)
                if self._closing:
                    return
                due = self._refreshing = True
                self._insisted = False

    def _interval_s_min(self) -> float:
        return min(REFRESH_INTERVAL_S_MIN * 2 ** min(self._failures, DOUBLINGS_MAX), REFRESH_INTERVAL_S_MAX)

    def _pause_s(self) -> float:
        """Until the next look. A set that is missing, or could not be read again, is looked for sooner."""
        if not self._failures:
            return REFRESH_S
        return min(REFRESH_AFTER_FAILURE_S * 2 ** min(self._failures - 1, DOUBLINGS_MAX), REFRESH_S)

    def _refresh(self) -> None:
        self._tried_at = self._clock.monotonic()
        try:
            self._adopt(self._load())
            self._failures = 0
        except Exception as error:  # noqa: BLE001 - whatever it is, the next look may go well
            self._failures += 1
            # The keys we have stay good: an issuer that is down must not lock everybody out.
            logger.warning("key set %s not refreshed, %d keys kept: %s", self._origin, self._keys.size, error)

    def _adopt(self, document: bytes) -> None:
        if document == self._document:
            return
        keys = parse_key_set(document)
        self._keys, self._document = keys, document
        self.version += 1
