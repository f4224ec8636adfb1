"""TLS from certificate files."""

from __future__ import annotations

import ssl
from pathlib import Path

from tailrace.errors import TailraceError


def server_context(cert_file: str | Path, key_file: str | Path) -> ssl.SSLContext:
    """A context for the listener; the certificate file may hold the whole chain."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Without this a client that prefers HTTP/2 would choose it and then be refused.
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert_file, key_file)
    except OSError as error:  # what is wrong with the content is an OSError too
        reason = error.strerror or str(error)
        raise TailraceError(
            "unavailable", f"cannot use the TLS certificate {cert_file} with the key {key_file}: {reason}"
        ) from error
    return context
