"""Signing keys, empty packages and a web server on loopback, for tests of packaging/repository.py."""

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import BinaryIO

if sys.platform == "win32":
    raise ImportError("repositories for Linux are made on Linux")

import apt
from container import CHECKOUT, Container

from scheduled_events_agent import __version__

NAME = "scheduled-events-agent"
ADDRESS: str = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Packages"]
"""Where pages and examples say that the repository is."""
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def make_repository(
    key: Path, packages: Path, into: Path, *options: str, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run packaging/repository.py to its end."""
    needed = {"apt-ftparchive": "apt-utils", "createrepo_c": "createrepo-c", "rpmsign": "rpm"}
    for program, package in needed.items():
        apt.need(program, package)
    command = [sys.executable, str(CHECKOUT / "packaging/repository.py"), "--key", str(key)]
    return subprocess.run(
        [*command, "--packages", str(packages), "--into", str(into), *options],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


# --- keys


@contextmanager
def gpg_home() -> Iterator[str]:
    """A folder for a gpg of one's own; its path is short enough for sockets."""
    apt.need("gpg")
    apt.need("gpg-agent")
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        try:
            yield home
        finally:
            subprocess.run(["gpgconf", "--homedir", home, "--kill", "all"], check=True, timeout=60)


def gpg(home: str, *arguments: str) -> str:
    """Run gpg there; returns what it wrote. Raises if it fails."""
    command = ["gpg", "--homedir", home, "--batch", "--pinentry-mode", "loopback", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def make_key(file: Path, *, passphrase: str = "", lasts: str = "never") -> Path:
    """Write a private key that was made in 2020; returns the file."""
    with gpg_home() as home:
        secret = ("--passphrase", passphrase)
        kind = (file.stem, "rsa2048", "sign", lasts)
        gpg(home, *secret, "--faked-system-time", "20200101T000000", "--quick-generate-key", *kind)
        file.write_text(gpg(home, *secret, "--armor", "--export-secret-keys"))
    return file


# --- packages


def add_stand_ins(folder: Path, version: str = __version__) -> Path:
    """Add an empty package for each format and processor for which the folder has none; returns the folder."""
    apt.need("rpmbuild", "rpm")
    with tempfile.TemporaryDirectory() as work:
        for architecture, machine in MACHINES.items():
            if not [*folder.glob(f"*_{architecture}.deb")]:
                _make_empty_deb(Path(work) / architecture, version, architecture, folder)
            if not [*folder.glob(f"*.{machine}.rpm")]:
                _make_empty_rpm(Path(work) / machine, version, machine, folder)
    return folder


def _make_empty_deb(work: Path, version: str, architecture: str, into: Path) -> None:
    facts = {"Package": NAME, "Version": f"{version}-1", "Architecture": architecture}
    facts |= {"Maintainer": "Tests <tests@example.com>", "Description": "a stand-in"}
    (work / "DEBIAN").mkdir(parents=True)
    (work / "DEBIAN/control").write_text("".join(f"{name}: {value}\n" for name, value in facts.items()))
    package = into / f"{NAME}_{version}-1_{architecture}.deb"
    subprocess.run(["dpkg-deb", "--build", work, package], check=True, capture_output=True, timeout=60)


def _make_empty_rpm(work: Path, version: str, machine: str, into: Path) -> None:
    work.mkdir()
    spec = work / "package.spec"
    spec.write_text(
        f"Name: {NAME}\nVersion: {version}\nRelease: 1\nSummary: a stand-in\nLicense: MIT\n"
        "%description\nNothing.\n%files\n"
    )
    defines = {"_topdir": work, "_rpmdir": into, "_rpmfilename": "%{NVRA}.rpm", "_dbpath": work / "database"}
    options = [word for name, value in defines.items() for word in ("--define", f"{name} {value}")]
    command = ["rpmbuild", "-bb", "--quiet", "--target", machine, *options, str(spec)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


# --- on the network


class Site:
    """A folder with an edition of the repository, and the address at which a web server has it."""

    def __init__(self, root: Path, address: str, key: Path) -> None:
        self.root = root
        self.address = address
        self._key = key

    def publish(self, packages: Path, *options: str, key: Path | None = None) -> None:
        """Make an edition of these packages, in the place of the one before."""
        done = make_repository(key or self._key, packages, self.root, "--address", self.address, *options)
        assert done.returncode == 0, done.stderr

    def change_a_byte(self, pattern: str) -> None:
        """Damage the one file with such a name."""
        (path,) = self.root.glob(pattern)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@contextmanager
def open_site(root: Path, key: Path) -> Iterator[Site]:
    """Serve a folder in which editions are published."""
    with served(root) as address:
        yield Site(root, address, key)


def forget_sources(machine: Container) -> None:
    """Have apt know of no repository."""
    machine.run("sh", "-c", "rm /etc/apt/sources.list && rm -r /var/lib/apt/lists/*")


class _Handler(SimpleHTTPRequestHandler):
    def send_head(self) -> BytesIO | BinaryIO | None:
        del self.headers["If-Modified-Since"]  # two editions may be of the same second
        return super().send_head()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a web server on loopback that has the files of a folder, whatever follows a question mark."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
