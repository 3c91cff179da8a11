"""The pytest plugin for users: their policy and hooks against the real agent, and what a failure shows."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from scheduled_events_agent.policy.load import ConfigError
from scheduled_events_agent.simulator import Simulator, SimulatorError
from scheduled_events_agent.simulator.testing import ExpectationError, HookResult, ScheduledEvents

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "testing-hooks.md").read_text(encoding="utf-8")
EXAMPLE = dict(re.findall(r"^```\w+ title=(\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def run_pytest(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Pytest as a user would run it there, away from this checkout's settings."""
    (directory / "pytest.ini").write_text("[pytest]\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(ROOT / "agent")
    return subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-v",
            "--basetemp=tmp",
            *options,
        ],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=240,
        check=False,
    )


def running_in(directory: Path) -> list[list[str]]:
    """Agents and hooks: all have a path in this directory on their command lines."""
    running = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in running if any(str(directory) in word for word in line)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The example of the page, in files."""
    project = tmp_path / "project"
    project.mkdir()
    for name, text in EXAMPLE.items():
        (project / name).write_text(text, encoding="utf-8")
    return project


@pytest.mark.timeout(280)  # a second pytest and its agents are started
@pytest.mark.parametrize("only", ["test_a_user", pytest.param("test", marks=pytest.mark.nightly)])
def test_the_example_of_the_page_passes(directory: Path, only: str) -> None:
    files = ("test_policy.py", "test_shared.py")
    assert set(EXAMPLE) == {"conftest.py", "policy.yaml", "drain.py", "resume.py", *files}
    ran = run_pytest(directory, "-k", only)
    tests = [test for file in files for test in re.findall(rf"^def ({only}\w+)", EXAMPLE[file], re.MULTILINE)]
    assert tests
    assert sorted(re.findall(r"::(\w+) PASSED", ran.stdout)) == sorted(tests), ran.stdout + ran.stderr
    assert ran.returncode == 0


@pytest.mark.nightly
@pytest.mark.timeout(280)  # a second pytest and its agents are started
def test_a_failure_shows_what_the_agent_wrote_and_leaves_nothing_running(directory: Path) -> None:
    (directory / "hang.py").write_text("import time\nprint('hangs', flush=True)\ntime.sleep(600)\n")
    (directory / "test_policy.py").write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "def test_it(scheduled_events):\n"
        "    hang = [sys.executable, Path('hang.py')]\n"
        "    scheduled_events.run('policy.yaml', hooks={'drain': hang, 'resume': hang})\n"
        "    event_id = scheduled_events.azure.schedule('Reboot')\n"
        "    hangs = lambda: 'hook output' in scheduled_events.log\n"
        "    scheduled_events.azure.wait_until(hangs, 'it hung', 60)\n"
        "    scheduled_events.wait_hook('drain', timeout_seconds=0.1)\n"
    )
    ran = run_pytest(directory)
    assert ran.returncode == 1
    assert (
        "ExpectationError: gave up waiting until hook drain had ended: it took longer than 0.1 s; the agent's"
        in ran.stdout
    )
    assert "hook_started: hook drain starts" in ran.stdout
    _, _, log = ran.stdout.partition("log of scheduled-events-agent call")
    assert '"message":"agent started"' in log
    assert '"line":"hangs"' in log
    assert running_in(directory) == []


def test_a_hook_of_a_killed_agent_ends_with_the_test(tmp_path: Path) -> None:
    path = write_policy(
        tmp_path, "rules: [{name: all, prepare: [one], lead: 1d}]\nhooks: {one: {run: ['replaced']}}\n"
    )
    hook = tmp_path / "hang.py"
    hook.write_text("import time\nprint('hangs', flush=True)\ntime.sleep(600)\n", encoding="utf-8")
    with Simulator(vms=("mine",), rate_limit=None) as azure:
        events = ScheduledEvents(tmp_path, azure)
        try:
            events.run(path, hooks={"one": [sys.executable, hook]})
            azure.schedule("Reboot", vms=["mine"])
            azure.wait_until(lambda: '"line":"hangs"' in events.log, "it hung", 60)
            events.kill()
        finally:
            events.stop()
    assert running_in(tmp_path) == []


def test_the_page_documents_everything_in_the_fixture_and_the_hook_result() -> None:
    _, _, rest = PAGE.partition("## The fixture")
    told = set(re.findall(r"`(\w+)", rest.partition("## What is different")[0]))
    offered = {name for name in vars(ScheduledEvents) if not name.startswith("_")} | {"azure", "directory", "vm"}
    assert offered | set(HookResult.__struct_fields__) <= told


@pytest.fixture
def events(tmp_path: Path) -> Iterator[ScheduledEvents]:
    with Simulator() as azure:
        yield ScheduledEvents(tmp_path, azure)


def write_policy(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_invalid_policy_is_reported_with_its_lines(tmp_path: Path, events: ScheduledEvents) -> None:
    path = write_policy(tmp_path, "rules:\n  - {name: a, prepare: [drain]}\n")
    with pytest.raises(ConfigError) as caught:
        events.run(path)
    assert str(caught.value) == f'{path}:2: rules[0].prepare[0]: there is no hook "drain"; there is no hook yet'


def test_a_hook_that_the_policy_does_not_have_cannot_be_replaced(tmp_path: Path, events: ScheduledEvents) -> None:
    path = write_policy(tmp_path, "{rules: [{name: a, prepare: [drain]}], hooks: {drain: {run: [drain]}}}")
    with pytest.raises(ValueError, match=r"^hooks: .*mine[.]yaml has no hook drian; it has drain$"):
        events.run(path, hooks={"drian": ["true"]})


def test_waiting_without_an_agent_does_not_last(events: ScheduledEvents) -> None:
    with pytest.raises(ExpectationError) as caught:
        events.wait_hook("drain")
    assert str(caught.value) == (
        "gave up waiting until hook drain had ended: the agent does not run; the agent's journal says: nothing\n"
        "and its log ends:\n  nothing"
    )


def test_a_policy_is_the_users_but_for_what_ties_it_to_a_machine(tmp_path: Path) -> None:
    path = write_policy(
        tmp_path,
        "rules:\n"
        "  - {name: all, drain_for: 1s, prepare: [one, two, three], approve: when-prepared, on_failure: approve}\n"
        "hooks:\n"
        "  one: {run: [one, a b], timeout: 7s, user: null, env: {A: b}}\n"
        "  two: {shell: exit 3, attempts: 2}\n"
        "  three: {run: [three]}\n"
        "imds: {endpoint: 'http://169.254.169.254', poll_interval: 9s, request_timeout: 4s}\n"
        "agent: {mode: observe, reserve: 2s, listen: '127.0.0.1:9769', state_dir: /nowhere}\n"
        "vm: {name: web_0, aliases: [x]}\n",
    )
    with Simulator(vms=("mine",), rate_limit=None) as azure:
        events = ScheduledEvents(tmp_path, azure)
        try:
            events.run(path, hooks={"three": ["x", Path("y")]})
            with pytest.raises(ExpectationError, match=r"^the agent runs already: stop\(\) or kill\(\) it first$"):
                events.run(path)
        finally:
            events.stop()
        written = json.loads((tmp_path / "policy.json").read_text(encoding="utf-8"))

    recorder = [sys.executable, "-I", "-S", str(tmp_path / "record_hook.py"), str(tmp_path / "hooks.jsonl")]
    assert written == {
        "rules": [
            {
                "name": "all",
                "drain_for": "1s",
                "prepare": ["one", "two", "three"],
                "approve": "when-prepared",
                "on_failure": "approve",
            }
        ],
        "hooks": {
            "one": {"run": [*recorder, "one", "", "one", "a b"], "timeout": "7s", "env": {"A": "b"}},
            "two": {"run": [*recorder, "two", "exit 3"], "attempts": 2},
            "three": {"run": [*recorder, "three", "", "x", str(Path("y").absolute())]},
        },
        "imds": {"endpoint": azure.endpoint(), "poll_interval": "250ms", "request_timeout": "4s"},
        "agent": {
            "mode": "observe",
            "reserve": "2s",
            "listen": "127.0.0.1:0",
            "state_dir": str(tmp_path / "state"),
            "log": {"format": "json"},
        },
    }


def test_a_shell_line_with_attempts_runs_as_in_production_across_a_crash(
    tmp_path: Path,
) -> None:
    path = write_policy(
        tmp_path,
        "rules: [{name: all, prepare: [one], recover: [two], lead: 1d}]\n"
        "hooks: {one: {shell: 'echo to %SCHEDULED_EVENT_VM%$SCHEDULED_EVENT_VM&& exit 3', attempts: 2, "
        "retry_delay: 10ms}, two: {run: ['no such program']}}\n",
    )
    with Simulator(vms=("mine",), rate_limit=None) as azure:
        events = ScheduledEvents(tmp_path, azure)
        try:
            events.run(path)
            event_id = azure.schedule("Freeze", vms=["mine"], notice_seconds=3600)
            one = events.wait_hook("one")
            assert "hook one: exit code 3 after 2 attempts" in events.wait_held(event_id)
            events.kill()
            azure.cancel(event_id)
            events.run(path)
            assert "retry or resolve it" in events.wait_recovery_failed(event_id)
            two = events.wait_hook("two", stage="recover", event_id=event_id)
            ended = [(hook.name, hook.stage, hook.outcome) for hook in events.hooks(event_id)]
            noted = [json.loads(line)["hook"] for line in (tmp_path / "hooks.jsonl").read_text().splitlines()]
            assert events.journal(event_id)[0].startswith("seen: Freeze Scheduled")
            assert not events.was_approved(event_id)
        finally:
            events.stop()

    assert one.outcome == "failed"
    assert "mine" in one.output
    assert one.environment["SCHEDULED_EVENT_STAGE"] == "prepare"
    assert two.output.startswith("cannot be started: no such program: ")
    assert ended == [("one", "prepare", "failed"), ("two", "recover", "failed")]
    assert noted == ["one", "one", "two"]


def test_the_agents_of_several_vms_have_each_their_own_state(tmp_path: Path) -> None:
    path = write_policy(
        tmp_path,
        "rules: [{name: all, prepare: [one], approve: when-prepared, shared: first, lead: 1h}]\n"
        "hooks: {one: {shell: 'echo for %SCHEDULED_EVENT_VM%$SCHEDULED_EVENT_VM'}}\n",
    )
    with Simulator(vms=("web/0", "web/1"), rate_limit=None) as azure:
        first = ScheduledEvents(tmp_path, azure)
        second = first.agent_of("web/1")
        try:
            for events in (first, second):
                events.run(path)
            event_id = azure.schedule("Reboot", vms=["web/0", "web/1"], lasts_seconds=None)
            first.wait_approved(event_id)
            azure.wait_polled(event_id, "web/1", 60.0)
            azure.end(event_id)
            for events in (first, second):
                events.wait_closed(event_id)
        finally:
            for events in first.all_agents():
                events.stop()

        assert (first.all_agents(), second.agent_of("web/1")) == ((first, second), second)
        assert [events.was_approved(event_id) for events in (first, second)] == [True, False]
        assert first.wait_hook("one").environment["SCHEDULED_EVENT_VM"] == "web/0"
        assert {end.environment["SCHEDULED_EVENT_VM"] for end in second.hooks()} <= {"web/1"}
        with pytest.raises(SimulatorError, match="no VM 'web/2' here; expected one of web/0, web/1"):
            first.agent_of("web/2")


@pytest.mark.timeout(280)  # a second pytest and its agents are started
def test_a_failure_shows_what_the_agents_of_all_vms_wrote_and_leaves_none(directory: Path) -> None:
    (directory / "test_policy.py").unlink()
    more = "    agents[1].wait_approved(restart, 0.1)\n"
    (directory / "test_shared.py").write_text(EXAMPLE["test_shared.py"] + more, encoding="utf-8")
    ran = run_pytest(directory)
    assert ran.returncode == 1
    _, _, logs = ran.stdout.partition("log of scheduled-events-agent call")
    own, _, other = logs.partition("log of scheduled-events-agent of web-1 call")
    assert '"message":"agent started"' in own
    assert '"message":"agent started"' in other
    assert running_in(directory) == []
