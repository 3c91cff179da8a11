"""Fixtures: the package built from this checkout, a machine on which it has been installed, an endpoint; all three
at work; and wheels for pip.

As with ``machines``, a test module asks for them by ``pytest_plugins = ["machines", "installed"]``.
"""

import platform
import subprocess
import sys

if sys.platform == "win32":
    raise ImportError("containers are Linux's")

from collections.abc import Iterator
from pathlib import Path

import pytest
from container import CHECKOUT, Container
from service import POLICY, Service, build_deb

from scheduled_events_agent.simulator import Simulator

# No server listens there: an agent that was given no simulator must not ask Azure's endpoint.
# (And all machines have one loopback, so no port of it is to be taken.)
NOWHERE = "{imds: {endpoint: 'http://127.0.0.1:9'}, agent: {listen: off}}\n"


@pytest.fixture(scope="session")
def deb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package for this machine's processor."""
    return build_deb(tmp_path_factory.mktemp("deb"))


@pytest.fixture(scope="session")
def installed(debian: Path, deb: Path) -> Iterator[Container]:
    """A stopped machine with the package, whose agent polls nothing; for others to lie on."""
    with Container(debian) as machine:
        machine.copy_in(deb, "/root/agent.deb")
        machine.write(POLICY, NOWHERE)
        machine.run("dpkg", "--install", "--force-confold", "/root/agent.deb")
        machine.stop()
        yield machine


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agent and all that it, its build and Ansible need, for Debian 12's Python; then no index is asked."""
    folder = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(CHECKOUT)], check=True)
    (own,) = folder.glob("scheduled_events_agent-*.whl")
    machine = platform.machine()
    kinds = [f"--platform={kind}_{machine}" for kind in ("manylinux2014", "manylinux_2_17", "manylinux_2_28")]
    options = ["--only-binary=:all:", "--python-version=3.11", "--implementation=cp", *kinds]
    wanted = [str(own), "pip", "hatchling", "ansible-core"]
    subprocess.run([*pip, "download", *options, "--dest", str(folder), *wanted], check=True)
    return folder


@pytest.fixture
def sim() -> Iterator[Simulator]:
    """The endpoint of the one VM that a machine is; on loopback, which all machines share."""
    with Simulator(vms=("vm-1",), rate_limit=None) as simulator:
        yield simulator


@pytest.fixture
def service(installed: Container, sim: Simulator) -> Iterator[Service]:
    """The agent, installed from its package in a booted container of its own; it polls the simulator."""
    with Container(installed) as machine:
        service = Service(machine, sim.endpoint())
        service.write_policy()
        service.systemctl("restart")
        yield service
        sys.stdout.write(machine.account())  # pytest shows it on failure only
