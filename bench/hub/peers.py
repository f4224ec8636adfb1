# pyright: strict
"""Servers that pass messages on and keep none: what the hub is measured beside."""

from __future__ import annotations

from pathlib import Path

from bench import install
from bench.peers import ALL, Command, Peer
from bench.places import BENCH


def _redis(port: int, _data: Path) -> Command:
    binary, libraries = install.redis_server()
    argv = [str(binary), "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    env = {} if libraries is None else {"LD_LIBRARY_PATH": str(libraries)}
    return Command([*argv, "--maxclients", "20000"], env, "PING")


def _nats(port: int, _data: Path) -> Command:
    return Command([str(install.nats_server()), "-a", "127.0.0.1", "-p", str(port)])


def _mosquitto(port: int, data: Path) -> Command:
    binary, libraries = install.mosquitto()
    config = data.parent / "mosquitto.conf"
    lines = (f"listener {port} 127.0.0.1", "allow_anonymous true", "user root", "max_queued_messages 0")
    config.write_text("\n".join(lines) + "\n")
    env = {} if libraries is None else {"LD_LIBRARY_PATH": str(libraries)}
    return Command([str(binary), "-c", str(config)], env)


def _node(port: int, _data: Path) -> Command:
    install.npm_peers()
    return Command(["node", str(BENCH / "hub/relay.mjs"), str(port)])


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("nats-core", "NATS core", "nats", False, _nats),
        Peer("redis-pubsub", "Redis pub/sub", "redis", False, _redis),
        Peer("mosquitto", "Mosquitto, QoS 0", "http", False, _mosquitto),
        Peer("node-ws", "node ws, a bare relay", "http", False, _node),
    )
}
ALL.update(PEERS)
