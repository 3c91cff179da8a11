"""What the cookbook tells its readers to try, done as they would: its files, its commands."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from harness import CHECKOUT, PATIENCE, Agent
from ports import free_port

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the hook is a script for a Unix shell")

PAGE = (CHECKOUT / "docs/cookbook/README.md").read_text("utf-8")


def block(language: str) -> str:
    """The one block of the page in this language."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


@contextlib.contextmanager
def running(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "scheduled_events_agent", *arguments],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_the_hook_the_policy_and_the_two_commands_of_the_page_do_what_it_says(agent: Agent) -> None:
    port = str(free_port())
    simulate, run = (
        line.removeprefix("$ scheduled-events-agent ").replace("8169", port).split()
        for line in block("console").splitlines()
    )
    assert run == ["run", "--config", "policy.yaml", "--state-dir", "state"]  # as the harness does it
    hook = agent.directory / "drain"
    hook.write_text(block("sh"))
    hook.chmod(0o755)
    policy = block("yaml").replace("/srv/try", str(agent.directory)).replace("8169", port)
    agent.config.write_text(f"{policy}agent: {{listen: 127.0.0.1:0}}\n")  # the usual port may be taken here
    with running(simulate) as simulator:
        assert simulator.stdout is not None
        assert simulator.stdout.readline().startswith(f"vm-1  http://127.0.0.1:{port}/")
        agent.start()
        agent.wait_log("closed")
        lines = [line["line"] for line in agent.log("hook output")]
        assert [re.sub(r"\d+", "N", line) for line in lines] == [
            "prepare for Reboot; seconds left: N",
            "recover for Reboot; seconds left: ?",
        ]
        simulator.stdout.read()
        assert simulator.wait(PATIENCE) == 0
