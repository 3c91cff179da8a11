"""The tutorial: every command in its order, and what the page shows of its output.

The steps that need root and the package are done on a booted machine, the others here.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

if sys.platform == "win32":
    pytest.skip("the tutorial is for Linux", allow_module_level=True)

from container import CHECKOUT, PATIENCE, Container
from ports import free_port
from service import POLICY

pytest_plugins = ["machines", "installed"]

PAGE = CHECKOUT / "docs/tutorial.md"
EXAMPLE_ID = "602D9444"
# Commands that only look: what they show may take a moment to come true.
LOOKS = re.compile(r"scheduled-events-agent (status|history)|curl ")
COMMANDS_MAY_TAKE_SECONDS = 300.0


class Step(NamedTuple):
    """A command of the page, and the output that is shown below it."""

    command: str
    output: str


def steps(text: str) -> Iterator[Step]:
    """The commands of the console blocks; a here-document belongs to its command."""
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for shown in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            first, _, rest = shown.partition("\n")
            if "<<" in first:
                body, end, rest = rest.partition("EOF\n")
                first = f"{first}\n{body}{end}"
            yield Step(first, rest)


def section(first: int, last: int) -> str:
    """The page from one numbered heading to the end of another's section."""
    text = PAGE.read_text(encoding="utf-8")
    end = text.find(f"\n## {last + 1}. ")
    return text[text.index(f"\n## {first}. ") : end if end >= 0 else len(text)]


def pattern_of(output: str) -> re.Pattern[str]:
    """What the output must match: ``...`` stands for anything in a line, a line of it for any number of lines."""
    lines = []
    for line in output.splitlines():
        text = re.escape(line).replace(re.escape("..."), ".*").replace(EXAMPLE_ID, r"[0-9A-F]{8}")
        lines.append(r"(?:.*\n)*" if line == "..." else rf"{text}\n")
    return re.compile("".join(lines))


class Shell:
    """A shell that runs one command after the other, with its folder and its background jobs."""

    def __init__(self, home: Path) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._shell = subprocess.Popen(
            ["bash"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"HOME": str(home), "PATH": path, "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )

    def run(self, command: str) -> str:
        """The output of the command; ``$?`` is that of the one before."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        # A job in the background must not keep the pipe: its output goes where the page sends it, or nowhere.
        command = re.sub(r" &$", " </dev/null 2>>errors.log &", command)
        self._shell.stdin.write(f'(exit $code)\n{command}\ncode=$?; echo "$EPOCHSECONDS done"\n')
        self._shell.stdin.flush()
        lines: list[str] = []
        for line in self._shell.stdout:
            if re.fullmatch(r"\d+ done\n", line):
                return "".join(lines)
            # The home directory is one that the system clears here, which the agent warns of.
            if ": warning: " not in line:
                lines.append(line.replace(", 1 warning", "").replace("valid, with 1 warning", "valid"))
        raise AssertionError(f"the shell has ended at {command!r}:\n{''.join(lines)}")

    def close(self) -> None:
        """End the shell and the jobs that it has started."""
        self.run("kill $(jobs -p) 2>/dev/null; kill $(cat web.pid 2>/dev/null) 2>/dev/null; wait")
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.close()
        self._shell.wait(PATIENCE)
        self._shell.stdout.close()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.close()


def test_every_step_prints_what_the_page_shows(shell: Shell) -> None:
    began = time.monotonic()
    event_id = EXAMPLE_ID
    page = section(3, 6)
    for port in ("8080", "8169", "9770"):  # other tests run beside this one
        assert port in page
        page = page.replace(port, str(free_port()))
    for command, output in steps(page):
        if (
            " simulate " in command
        ):  # a reader is slower than the simulator, which ends three seconds after the event
            (port,) = re.findall("--port ([0-9]+)", command)
            shell.run(f"while (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null; do sleep 0.2; done")
        wanted = pattern_of(output)
        give_up_at = time.monotonic() + 2.0 * PATIENCE
        while True:
            printed = shell.run(command.replace(EXAMPLE_ID, event_id))
            if wanted.fullmatch(printed):
                break
            is_final = not LOOKS.match(command) or time.monotonic() > give_up_at
            assert not is_final, f"{command}\nprinted\n{printed}\nexpected\n{output}"
            time.sleep(0.5)
        event_id = next(iter(re.findall(r" retry ([0-9A-F]{8}) ", printed)), event_id)
    assert time.monotonic() - began < COMMANDS_MAY_TAKE_SECONDS  # of a reader's three quarters of an hour


def test_the_steps_for_root_work_with_the_package(installed: Container) -> None:
    """Its policy is the shipped one, which asks an address that no one answers here."""
    shipped = (CHECKOUT / "config/policy.yaml").read_text(encoding="utf-8")
    with Container(installed, private_network=True) as machine:
        machine.write(POLICY, shipped)
        for command, output in (*steps(section(1, 2)), *steps(section(7, 7))):
            if command.startswith("sudo apt install "):
                continue  # it is installed: tests/system/installed.py
            done = machine.run("sh", "-c", command.removeprefix("sudo "), check="doctor" not in command)
            assert not output or pattern_of(output).fullmatch(done.stdout), (command, done.stdout)
            if "doctor" in command:
                assert "endpoint" in done.stdout
        assert "mode: observe" in machine.path(POLICY).read_text()


def test_the_page_is_short_and_has_one_path() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    prose = re.sub(r"^```.*?^```|`[^`]+`", "", text, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"(?i)\bor\b|\bif you\b|\balternatively\b|\boptionally\b", prose) == []
