"""``python -m tailrace.healthcheck``: whether the server of this container runs.

Address and TLS come from environment variables and ``tailrace.toml``; flags of ``serve`` are not known.
"""

from __future__ import annotations

import http.client
import ssl
import sys

from tailrace.common.settings import Settings, SettingsError
from tailrace.common.settings_loading import load_settings

WAIT_S = 2.0


def main() -> int:
    try:
        status = status_of(load_settings())
    except (SettingsError, OSError, http.client.HTTPException) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0 if status == 200 else 1


def status_of(settings: Settings) -> int:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104 - compared
    if settings.tls_cert or settings.tls_self_signed:
        # The certificate is for the public name, not for this address.
        trusting = ssl.create_default_context()
        trusting.check_hostname = False
        trusting.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, settings.port, timeout=WAIT_S, context=trusting)
    else:
        connection = http.client.HTTPConnection(host, settings.port, timeout=WAIT_S)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
