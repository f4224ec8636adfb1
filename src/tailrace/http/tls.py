"""TLS: certificate files that can be reloaded, and self-signed certificates for development."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import ssl
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tailrace.common.errors import TailraceError
from tailrace.common.private_files import replace_file


class Certificate:
    """The files of a certificate, and the TLS context of the listener."""

    def __init__(self, cert_file: str | Path, key_file: str | Path) -> None:
        self._cert_file = cert_file
        self._key_file = key_file
        self.context = server_context(cert_file, key_file)

    def reload(self) -> None:
        """Use the files' current content for new connections; raises and changes nothing if it is invalid."""
        # Validated on a separate context: an invalid pair would leave the listener without a certificate.
        server_context(self._cert_file, self._key_file)
        load_certificate(self.context, self._cert_file, self._key_file)


def server_context(cert_file: str | Path, key_file: str | Path) -> ssl.SSLContext:
    """A context for the listener; the certificate file may contain the whole chain."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Without this a client that prefers HTTP/2 would select it and fail.
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, cert_file, key_file)
    return context


def load_certificate(context: ssl.SSLContext, cert_file: str | Path, key_file: str | Path) -> None:
    try:
        context.load_cert_chain(cert_file, key_file)
    except OSError as error:  # also raised for invalid content
        reason = error.strerror or str(error)
        raise TailraceError(
            "unavailable", f"cannot load TLS certificate {cert_file} with key {key_file}: {reason}"
        ) from error


CERTIFICATE_LIFETIME: Final = timedelta(days=90)
RENEW_BEFORE: Final = timedelta(days=14)  # before it expires, at the next start
LOCAL: Final = ("localhost", "127.0.0.1", "::1")


def self_signed_certificate(directory: Path, host: str) -> tuple[Path, Path]:
    """The files of a certificate and its key, created if missing, about to expire or for another host."""
    cert_file, key_file = directory / "cert.pem", directory / "key.pem"
    wanted = subject_alternative_names(host)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _directory_lock(directory):
        if not key_file.is_file() or not _is_usable(cert_file, wanted):
            key = ec.generate_private_key(ec.SECP256R1())
            encoded = key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            replace_file(key_file, encoded)
            replace_file(cert_file, _certificate(key, wanted).public_bytes(serialization.Encoding.PEM))
    return cert_file, key_file


@contextmanager
def _directory_lock(directory: Path) -> Generator[None]:
    """Several processes of one server share one certificate."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def subject_alternative_names(host: str) -> list[x509.GeneralName]:
    """The local names of this machine, and the address that the server listens on."""
    return [_general_name(name) for name in dict.fromkeys((*LOCAL, host)) if name not in ("0.0.0.0", "::")]  # noqa: S104


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _is_usable(cert_file: Path, wanted: list[x509.GeneralName]) -> bool:
    try:
        found = x509.load_pem_x509_certificate(cert_file.read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    return list(names) == wanted and found.not_valid_after_utc - datetime.now(UTC) > RENEW_BEFORE


def _certificate(key: ec.EllipticCurvePrivateKey, names: list[x509.GeneralName]) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tailrace for development")])
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks of clients may be behind
        .not_valid_after(now + CERTIFICATE_LIFETIME)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
