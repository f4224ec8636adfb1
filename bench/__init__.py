"""Benches: Tailrace beside its peers, on one machine, in one run. See README.md."""
