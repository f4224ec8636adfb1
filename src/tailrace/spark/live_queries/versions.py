"""Versions of this package side by side: each as an archive in the store, unpacked where its matcher runs."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

import tailrace
from tailrace.spark.blobs import shared_object_store

ARCHIVES_FOLDER: Final = "watch/matchers/"
PACKAGE: Final = "tailrace"
ARCHIVE_BYTES_MAX: Final = 64 << 20
DOWNLOAD_S_MAX: Final = 300
_ZIP_DATE: Final = (1980, 1, 1, 0, 0, 0)  # the first date that a zip file knows


class PackageVersionError(ValueError):
    """A version that cannot be had."""


def load_archive(given: str) -> bytes:
    """A version as an archive: a wheel, a directory that holds the package, or a version number."""
    path = Path(given)
    if path.suffix in (".whl", ".zip"):
        if not path.is_file():
            raise PackageVersionError(f"there is no file {given}")
        return _verify_archive(path.read_bytes(), given)
    if (path / PACKAGE / "__init__.py").is_file():
        return _zip_package(path / PACKAGE)
    if given in ("installed", tailrace.__version__):
        return _zip_package(Path(tailrace.__file__).parent)
    if "/" in given or path.exists():
        raise PackageVersionError(f"{given} is neither a wheel nor a directory with the package {PACKAGE}")
    return _download_wheel(given)


def put_archive(store: str, data: bytes) -> str:
    name = hashlib.sha256(data).hexdigest()
    shared_object_store(store).create(f"{ARCHIVES_FOLDER}{name}.zip", data)
    return name


def unpack_archive(store: str, name: str, directory: Path) -> None:
    """Puts the package of an archive into a directory, which then comes first for a Python."""
    data = shared_object_store(store).get(f"{ARCHIVES_FOLDER}{name}.zip")
    if hashlib.sha256(data).hexdigest() != name:
        raise PackageVersionError(f"the archive {name} is not what was put there")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        archive.extractall(directory, [one for one in archive.namelist() if one.startswith(f"{PACKAGE}/")])


def _verify_archive(data: bytes, given: str) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if f"{PACKAGE}/__init__.py" not in archive.namelist():
                raise PackageVersionError(f"{given} does not hold the package {PACKAGE}")
            if sum(one.file_size for one in archive.infolist()) > ARCHIVE_BYTES_MAX:
                raise PackageVersionError(f"{given} is larger than {ARCHIVE_BYTES_MAX} bytes")
    except zipfile.BadZipFile:
        raise PackageVersionError(f"{given} is no wheel") from None
    return data


def _zip_package(package: Path) -> bytes:
    """The same bytes for the same files."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in sorted(package.rglob("*")):
            name = path.relative_to(package)
            if path.is_file() and "__pycache__" not in name.parts:
                archive.writestr(
                    zipfile.ZipInfo(f"{PACKAGE}/{name.as_posix()}", _ZIP_DATE), path.read_bytes()
                )
    return sink.getvalue()


def _download_wheel(version: str) -> bytes:
    """From where pip gets packages on this machine."""
    with tempfile.TemporaryDirectory(prefix="tailrace-version-") as directory:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q"]
        try:
            subprocess.run(  # noqa: S603 - no shell, and the version is one argument
                [*command, "-d", directory, f"{PACKAGE}=={version}"],
                capture_output=True,
                timeout=DOWNLOAD_S_MAX,
                check=True,
            )
        except subprocess.SubprocessError:
            raise PackageVersionError(
                f"version {version} cannot be downloaded; name a wheel instead"
            ) from None
        wheels = list(Path(directory).glob("*.whl"))
        if not wheels:
            raise PackageVersionError(f"version {version} is no wheel")
        return _verify_archive(wheels[0].read_bytes(), version)
