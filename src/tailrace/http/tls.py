"""TLS from certificate files, which may be replaced while the server runs."""

from __future__ import annotations

import ssl
from pathlib import Path

from tailrace.common.errors import TailraceError


class Certificate:
    """The files of a certificate, and the context of the listener that presents it."""

    def __init__(self, cert_file: str | Path, key_file: str | Path) -> None:
        self._cert_file = cert_file
        self._key_file = key_file
        self.context = server_context(cert_file, key_file)

    def reload(self) -> None:
        """New connections get what the files hold now. What cannot be used raises and changes nothing."""
        # Tried on a context of its own: a pair that does not fit would leave the listener without any.
        server_context(self._cert_file, self._key_file)
        load_certificate(self.context, self._cert_file, self._key_file)


def server_context(cert_file: str | Path, key_file: str | Path) -> ssl.SSLContext:
    """A context for the listener; the certificate file may hold the whole chain."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Without this a client that prefers HTTP/2 would choose it and then be refused.
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, cert_file, key_file)
    return context


def load_certificate(context: ssl.SSLContext, cert_file: str | Path, key_file: str | Path) -> None:
    try:
        context.load_cert_chain(cert_file, key_file)
    except OSError as error:  # what is wrong with the content is an OSError too
        reason = error.strerror or str(error)
        raise TailraceError(
            "unavailable", f"cannot use the TLS certificate {cert_file} with the key {key_file}: {reason}"
        ) from error
