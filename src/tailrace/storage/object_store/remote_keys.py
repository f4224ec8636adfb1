"""Whether there are keys for a bucket, before anybody is asked.

Without keys the library asks the cloud's own address for the role of the machine. A server that was named by
its endpoint knows no such roles, and outside of a cloud nobody answers there, so that a key which was
forgotten would show as a store that does not answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_ENDPOINTS: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
# Each is enough, all of one group together.
_CREDENTIALS: Final = {
    "s3": (
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        ("AWS_WEB_IDENTITY_TOKEN_FILE",),
        ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI",),
    ),
    "az": (
        ("AZURE_STORAGE_ACCOUNT_KEY",),
        ("AZURE_STORAGE_SAS_KEY",),
        ("AZURE_STORAGE_SAS_TOKEN",),
        ("AZURE_STORAGE_TOKEN",),
        ("AZURE_CLIENT_ID", "AZURE_TENANT_ID"),
        ("AZURE_FEDERATED_TOKEN_FILE",),
    ),
}
_UNSIGNED: Final = {"s3": "AWS_SKIP_SIGNATURE", "az": "AZURE_SKIP_SIGNATURE"}


def endpoint_of(scheme: str, env: Mapping[str, str]) -> str:
    """The server that was named, empty for the cloud's own."""
    return next((env[name] for name in _ENDPOINTS.get(scheme, ()) if env.get(name)), "")


def check_credentials(url: str, scheme: str, env: Mapping[str, str]) -> None:
    """ValueError if a server was named and nothing that could open its door."""
    endpoint = endpoint_of(scheme, env)
    if not endpoint or env.get(_UNSIGNED[scheme], "").lower() in ("1", "true", "yes", "on"):
        return
    if any(all(env.get(name) for name in group) for group in _CREDENTIALS[scheme]):
        return
    wanted, unsigned = " and ".join(_CREDENTIALS[scheme][0]), _UNSIGNED[scheme]
    raise ValueError(
        f"there are no keys for {url} at {endpoint}: set {wanted}, or {unsigned}=true if it wants none"
    )
