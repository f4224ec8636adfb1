"""Live queries: the gateway, its sessions and subscriptions over WebSocket and SSE."""
