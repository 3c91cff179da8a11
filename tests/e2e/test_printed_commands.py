"""Every command line that a command prints works as it stands, for the agent that it is about, in each state."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import CHECKOUT, PATIENCE, Agent, Simulator

from scheduled_events_agent.cli import _COMMANDS

RULE = {"name": "all", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared"}
PRINTED = re.compile(rf"scheduled-events-agent ((?:{'|'.join(_COMMANDS)})\b.*)")
# The end of a command line in a sentence or a table.
END = re.compile(r"  |; |, and its log| says why|$", re.MULTILINE)
# Doctor shows the command line of each other agent that runs on this machine, such as one of another test.
OTHER_AGENT = re.compile(r"another agent acts on this machine, process .*")
LOOKS = (
    ("status",), ("status", "--json"), ("history",), ("explain",), ("explain", "--json"), ("doctor",),
    ("doctor", "--json"), ("approve", "nosuch"), ("retry", "nosuch", "--json"), ("fleet", "status"),
    ("notify", "test"),
)  # fmt: skip


@pytest.fixture
def agent(sim: Simulator, tmp_path: Path) -> Iterator[Agent]:
    """With a policy and a state directory of its own, whose names need quotes."""
    with Agent(tmp_path / "my agent", sim.endpoint()) as agent:
        yield agent


def texts(value: Any) -> Iterator[str]:
    """All texts in what was read from JSON."""
    match value:
        case str():
            yield value
        case list():
            for inner in value:
                yield from texts(inner)
        case dict():
            yield from texts([*value.values()])


def printed(output: str) -> Iterator[str]:
    """The command lines in what a command has printed."""
    lines = list(texts(json.loads(output))) if output.startswith("{") else output.splitlines()
    for line in lines:
        for found in PRINTED.findall(OTHER_AGENT.sub("", line)):
            yield END.split(found)[0]


def words_of(line: str) -> list[str]:
    return shlex.split(line.replace("\\", "\\\\") if sys.platform == "win32" else line)


def collect(agent: Agent) -> set[str]:
    """The command lines that the agent's commands and its page print now."""
    found: set[str] = set()
    for look in LOOKS:
        # One is enough for some; the others find the state directory in the policy.
        options = ["--config", str(agent.config)]
        if look[0] not in ("fleet", "notify"):
            options += ["--state-dir", str(agent.state_dir)]
        done = agent.run(*look, *options)
        found.update(printed(done.stdout))
        found.update(printed(done.stderr))
    found.update(printed(agent.get("/status")[1]))
    return found


def assert_starts(agent: Agent, words: list[str]) -> None:
    process = subprocess.Popen(
        agent.command(*words), cwd=CHECKOUT, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        look = ("status", "--json", "--state-dir", str(agent.state_dir))
        agent.wait_until(lambda: json.loads(agent.run(*look).stdout)["source"] == "agent", "it ran")
        policy = json.loads(agent.run(*look).stdout)["policy"]
        assert policy["file"] == str(agent.config)
    finally:
        process.kill()
        process.wait(PATIENCE)


def wait_by_hand(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[{**RULE, "approve": "manual", "prepare": []}], hooks=agent.hooks("resume"))
    agent.start()
    event = sim.schedule("Reboot", notice_seconds=3600, lasts_seconds=None)
    needs = {"kind": "approval_needed", "event_id": event}
    agent.wait_until(
        lambda: any(needs.items() <= one.items() for one in agent.status()["attention"]), "it needed approval"
    )


def fail_to_prepare(sim: Simulator, agent: Agent) -> str:
    hooks = {name: agent.hook(name, exit_code=3) for name in ("drain", "resume")}
    agent.write_policy(rules=[RULE], hooks=hooks)
    agent.start()
    event = sim.schedule("Reboot", notice_seconds=3600, lasts_seconds=None)
    agent.wait_phase(event, "held")
    return event


def fail_to_recover(sim: Simulator, agent: Agent) -> None:
    event = fail_to_prepare(sim, agent)
    sim.cancel(event)
    agent.wait_phase(event, "recovery_failed")


def hold(sim: Simulator, agent: Agent) -> None:
    event = fail_to_prepare(sim, agent)
    assert agent.say("hold", event).returncode == 0


def be_away(sim: Simulator, agent: Agent) -> None:
    fail_to_prepare(sim, agent)
    agent.kill()


def reject_policy(sim: Simulator, agent: Agent) -> None:
    fail_to_prepare(sim, agent)
    agent.config.write_text("rulez: []\n", encoding="utf-8")
    agent.reload()
    agent.wait_until(lambda: agent.status()["policy"]["rejected"], "the policy was rejected")


@pytest.mark.parametrize(
    ("bring_about", "expected"),
    [
        (wait_by_hand, {"approve", "hold"}),
        (fail_to_prepare, {"retry", "approve", "status"}),
        (fail_to_recover, {"retry", "resolve", "status"}),
        (hold, {"release", "approve"}),
        (be_away, {"run", "doctor"}),
        pytest.param(
            reject_policy,
            {"retry", "approve", "check"},
            marks=pytest.mark.skipif(sys.platform == "win32", reason="it sends SIGHUP"),
        ),
    ],
)
def test_a_printed_command_line_works_for_the_agent_that_it_is_about(
    sim: Simulator, agent: Agent, bring_about: Callable[[Simulator, Agent], None], expected: set[str]
) -> None:
    bring_about(sim, agent)
    lines = collect(agent)
    assert expected <= {words_of(line)[0] for line in lines}
    for line in sorted(lines):
        words = words_of(line)
        if words[0] == "run":
            assert_starts(agent, words)
            continue
        done = agent.run(*words)
        output = done.stdout + done.stderr
        assert "no agent has run" not in output
        if words[0] == "check" and bring_about is reject_policy:
            assert (done.returncode, str(agent.config) in output) == (2, True), line
        else:
            assert done.returncode != 2, line
