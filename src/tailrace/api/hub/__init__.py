"""The hub on the network: its sockets, its routes, and the log behind it."""
