"""The hooks for a Ray node, with scripts for its raylet, for the head's server, and for the command ray."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are shell scripts for Linux", allow_module_level=True)

from examples import ServiceManager, Unit, copy_hooks
from harness import PATIENCE

pytestmark = pytest.mark.usefixtures("hook_shell")
UNIT = "ray.service"
# The kernel names a process after its script.
LEAVES = """#!/bin/sh
until [ -e {directory}/drained ]; do sleep 0.1; done
"""
STARTS = """#!/bin/sh
until [ -e {directory}/ready ]; do sleep 0.1; done
{directory}/raylet --node_id=n1 --gcs-address=head:6379 --static_resource_list=CPU,2
"""
RAY = """#!/bin/sh
echo "$*" >>{directory}/commands
if [ -e {directory}/no-head ]; then exit 3; fi
touch {directory}/drained
"""


class Node:
    """A unit that begins with ``program``, and the hooks for it."""

    def __init__(self, directory: Path, manager: ServiceManager) -> None:
        self.directory = directory
        self.manager = manager
        self.mark = directory / "mark"
        self._hooks = copy_hooks(directory)

    def start(self, hook: str, event: str = "A") -> subprocess.Popen[str]:
        variables = {
            "PATH": f"{self.manager.directory}:/usr/bin:/bin",
            "RAY_COMMAND": str(self.directory / "ray"),
            "RAY_MARK": str(self.mark),
            "SCHEDULED_EVENT_ID": event,
        }
        return subprocess.Popen(
            [str(self._hooks / hook)], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, hook: str, event: str = "A") -> tuple[int, str, str]:
        """Exit code, output, and errors. ``event``: empty for an on_clear hook."""
        with self.start(hook, event) as process:
            output, errors = process.communicate(timeout=PATIENCE)
        return process.returncode, output, errors

    def has(self, process: str) -> bool:
        return any(
            found.info["name"] == process and any(f"{self.directory}/" in word for word in found.info["cmdline"])
            for found in psutil.process_iter(["name", "cmdline"])
            if found.info["cmdline"]
        )


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, f"not in time: {what}"
        time.sleep(0.05)


@contextmanager
def a_node(directory: Path, program: str = "starts") -> Iterator[Node]:
    for name, text in {"raylet": LEAVES, "gcs_server": LEAVES, "starts": STARTS, "ray": RAY}.items():
        (directory / name).write_text(text.format(directory=directory), encoding="utf-8")
        (directory / name).chmod(0o755)
    (directory / "ready").touch()
    with ServiceManager(directory / "bin", {UNIT: Unit((str(directory / program),))}) as manager:
        yield Node(directory, manager)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with a_node(tmp_path) as node:
        node.manager.start(UNIT)
        wait_until(lambda: node.has("raylet"), "the raylet ran")
        yield node


@contextmanager
def joining(node: Node) -> Iterator[subprocess.Popen[str]]:
    """ray-recover, which waits for a raylet: there is none until there is a file "ready"."""
    for file in ("ready", "drained"):
        (node.directory / file).unlink()
    node.manager.calls.clear()
    with node.start("ray-recover") as hook:
        looked = ("show", "--property=ControlGroup", "--value", UNIT)
        wait_until(lambda: looked in [call.arguments for call in node.manager.calls], "it looked for a raylet")
        yield hook


def test_a_drained_node_leaves_and_joins_again_when_its_raylet_runs(node: Node) -> None:
    code, output, errors = node.run("ray-prepare")
    assert (code, errors) == (0, "")
    assert output.splitlines()[-1] == f"ray-prepare: {UNIT} is stopped"
    assert "--address head:6379 --node-id n1 " in (node.directory / "commands").read_text("utf-8")
    assert not node.manager.runs(UNIT)

    with joining(node) as hook:
        assert node.mark.exists()
        (node.directory / "ready").touch()
        output, _ = hook.communicate(timeout=PATIENCE)
    assert (hook.returncode, output) == (0, f"ray-recover: {UNIT} is started\n")
    assert node.has("raylet")
    assert not node.mark.exists()


def test_a_node_that_could_not_be_drained_works_on_and_is_not_restarted(node: Node) -> None:
    (node.directory / "no-head").touch()
    said = "ray-prepare: the node could not be drained (code 3); it works on\n"
    assert node.run("ray-prepare") == (1, "", said)
    said = "ray-recover: not drained by ray-prepare: left as it is\n"
    assert node.run("ray-recover") == (0, said, "")
    assert node.manager.runs(UNIT)


def test_a_failed_drain_leaves_the_mark_of_an_earlier_run(node: Node) -> None:
    (node.directory / "no-head").touch()
    node.mark.write_text("A\n\n\n", encoding="utf-8")  # of the same event
    assert node.run("ray-prepare")[0] == 1
    assert node.mark.exists()


def test_the_head_is_not_stopped_even_without_a_raylet(tmp_path: Path) -> None:
    with a_node(tmp_path, "gcs_server") as node:
        node.manager.start(UNIT)
        wait_until(lambda: node.has("gcs_server"), "the head ran")
        said = "ray-prepare: this is the head of the cluster: it cannot leave\n"
        assert node.run("ray-prepare") == (1, "", said)
        assert node.manager.runs(UNIT)
        assert not node.mark.exists()


def test_a_unit_that_is_about_to_start_again_is_stopped_and_started_afterwards(tmp_path: Path) -> None:
    with a_node(tmp_path) as node:
        node.manager.states[UNIT] = "activating"
        assert node.run("ray-prepare") == (0, f"ray-prepare: {UNIT} is stopped\n", "")
        assert UNIT not in node.manager.states
        assert node.run("ray-recover") == (0, f"ray-recover: {UNIT} is started\n", "")


def test_a_node_that_fails_after_the_hooks_own_start_is_started_again(node: Node) -> None:
    assert node.run("ray-prepare")[0] == 0
    with joining(node) as hook:
        hook.terminate()  # its time is over
        hook.communicate(timeout=PATIENCE)
    node.manager.power_off(UNIT)
    (node.directory / "ready").touch()
    assert node.run("ray-recover", event="") == (0, f"ray-recover: {UNIT} is started\n", "")


@pytest.mark.parametrize("passing", [["deactivating"], []])
def test_a_unit_that_another_has_stopped_stays_stopped(tmp_path: Path, passing: list[str]) -> None:
    with a_node(tmp_path) as node:
        node.manager.passing[UNIT] = passing
        node.manager.states[UNIT] = "inactive"
        assert node.run("ray-prepare") == (0, f"ray-prepare: {UNIT} does not run\n", "")
        assert not node.mark.exists()
        assert "stop" not in [call.arguments[0] for call in node.manager.calls]
