"""Replication with RxDB clients: pull, push and live feeds."""
