"""Fixtures of tests that need a booted systemd; a test module gets them by ``pytest_plugins = ["machines"]``.

(Not a conftest.py, for the type checker takes two files of that name for one module.) What lies on something
installed, which is the same for many tests, is made in a fixture of their own:

    @pytest.fixture(scope="module")
    def installed(debian: Path) -> Iterator[Container]:
        with Container(debian) as machine:
            machine.run("apt-get", "install", ...)
            machine.stop()
            yield machine

    with Container(installed) as machine: ...  # in half a second, and of no consequence for the next test
"""

import sys

if sys.platform == "win32":
    raise ImportError("containers are Linux's")

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from container import Container, ContainerUnavailableError, root_file_system


@pytest.fixture(scope="session")
def debian(pytestconfig: pytest.Config) -> Path:
    """Debian 12's root file system: Python 3.11, systemd 252."""
    return _root_or_skip("bookworm", pytestconfig)


@pytest.fixture(scope="session")
def debian_13(pytestconfig: pytest.Config) -> Path:
    """Debian 13's root file system: Python 3.13, systemd 257."""
    return _root_or_skip("trixie", pytestconfig)


@pytest.fixture(scope="session")
def debian_11(pytestconfig: pytest.Config) -> Path:
    """Debian 11's root file system: Python 3.9, systemd 247, polkit 0.105."""
    return _root_or_skip("bullseye", pytestconfig)


@pytest.fixture(scope="session")
def ubuntu_22(pytestconfig: pytest.Config) -> Path:
    """Ubuntu 22.04's root file system: Python 3.10 and 3.11, systemd 249, polkit 0.105."""
    return _root_or_skip("jammy", pytestconfig)


@pytest.fixture
def container(debian: Path) -> Iterator[Container]:
    """A fresh Debian 12, booted."""
    with Container(debian) as machine:
        yield machine
        sys.stdout.write(machine.account())  # pytest shows it on failure only


def _root_or_skip(suite: str, config: pytest.Config) -> Path:
    capture = config.pluginmanager.getplugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled() if capture else nullcontext():  # progress is to be seen
            return root_file_system(suite)
    except ContainerUnavailableError as reason:
        pytest.skip(str(reason))
