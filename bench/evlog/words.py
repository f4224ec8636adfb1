# pyright: strict
"""What the events are made of: services, paths, people, words. Earlier ones are drawn more often."""

from __future__ import annotations

from typing import Final

SERVICES: Final = (
    *("checkout", "catalog", "auth", "search", "cart", "payments", "inventory", "shipping"),
    *("notifications", "pricing", "recommendations", "accounts", "media", "reviews", "gateway", "fraud"),
    *("ledger", "subscriptions", "exports", "webhooks", "support", "imports", "audit", "Legacy-Billing"),
)
ENVIRONMENTS: Final = ("production", "production", "production", "production", "staging", "preview")
REGIONS: Final = ("eu-central-1", "us-east-1", "eu-west-1", "ap-southeast-2", "sa-east-1")
VERSIONS: Final = tuple(
    f"{major}.{minor}.{patch}" for major in (4, 5) for minor in (0, 3, 7) for patch in range(4)
)
METHODS: Final = ("GET", "GET", "GET", "GET", "GET", "POST", "POST", "PUT", "DELETE", "PATCH")
PLANS: Final = ("free", "free", "free", "team", "team", "enterprise")
AGENTS: Final = (
    "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 Chrome/131.0 Safari/537.36",
    "Mozilla/5.0 (iPhone; CPU iPhone OS 18_1 like Mac OS X) AppleWebKit/605.1.15 Mobile/15E148",
    "shop-android/9.14.2 (Android 15; Pixel 8)",
    "python-httpx/0.28.1",
    "Go-http-client/2.0",
)
FLAGS: Final = ("new-cart", "fast-lane", "dark-mode", "beta-search", "split-ledger", "eu-invoices")

RESOURCES: Final = (
    *("orders", "products", "sessions", "queries", "carts", "payments", "stock", "parcels"),
    *("messages", "prices", "suggestions", "users", "images", "reviews", "routes", "cases"),
)

# `{noun}`, `{id}` and `{ms}` are filled in. The first is in nearly half of all events.
MESSAGES: Final = (
    "request completed",
    "request completed after {ms} ms",
    "cache hit for {noun}",
    "cache miss for {noun} {id}, loaded from replica",
    "user session refreshed",
    "{noun} listing served from index",
    "published {noun} event to queue",
    "rate limit close to threshold for tenant {id}",
    "slow query on {noun} took {ms} ms",
    "Größe des {noun} geändert für Kunde {id}",
    "scheduled {noun} export finished 🚀",
)
NOUNS: Final = (
    *(
        "order",
        "product",
        "invoice",
        "basket",
        "parcel",
        "coupon",
        "refund",
        "wishlist",
        "warehouse",
        "tariff",
    ),
    *(
        "voucher",
        "address",
        "receipt",
        "pallet",
        "courier",
        "label",
        "supplier",
        "bundle",
        "return",
        "deposit",
    ),
    *(
        "ledger",
        "quota",
        "snapshot",
        "webhook",
        "tenant",
        "avatar",
        "thumbnail",
        "digest",
        "playlist",
        "locale",
    ),
)

# Name, message, why and fix of what goes wrong.
ERRORS: Final = (
    (
        "TimeoutError",
        "upstream timeout after {ms} ms",
        "the {noun} service did not answer within its deadline",
        "retry with backoff or raise the deadline of {noun} calls",
    ),
    (
        "ConnectionError",
        "connection reset by peer",
        "the pool handed out a connection that the database had closed",
        "enable keepalive probes for the {noun} pool",
    ),
    (
        "CardDeclined",
        "card declined by issuer",
        "insufficient funds on the card of customer {id}",
        "ask the customer for another payment method",
    ),
    (
        "ConflictError",
        "{noun} {id} was changed by someone else",
        "two writers held the same version of the {noun}",
        "read the {noun} again and apply the change to the new version",
    ),
    (
        "DeadlockError",
        "deadlock detected while updating {noun}",
        "two transactions locked {noun} rows in opposite order",
        "lock {noun} rows in the order of their ids",
    ),
    (
        "ValidationError",
        "field {noun} must not be empty",
        "the client sent an old form",
        "update the client to the current version of the form",
    ),
)
