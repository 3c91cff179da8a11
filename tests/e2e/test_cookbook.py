"""The commands and files of the cookbook's pages are tried as its readers would try them."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml
from harness import CHECKOUT, PATIENCE, Agent
from ports import free_port

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the hook is a script for a Unix shell")

PAGE = (CHECKOUT / "docs/cookbook/README.md").read_text("utf-8")
SIMULATOR_PAGE = (CHECKOUT / "docs/simulator.md").read_text("utf-8").partition("\n## Manual events\n")[2]


def block(language: str, page: str = PAGE.partition("\n## Try it\n")[2]) -> str:
    """The first block in this language."""
    return str(re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0])


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


def test_cookbook_hook_policy_and_commands_do_what_the_page_says(agent: Agent) -> None:
    port = str(free_port())
    simulate, run, status = (
        line.removeprefix("$ scheduled-events-agent ").replace("8169", port).split()
        for line in block("console").splitlines()
    )
    assert run == ["run", "--config", "policy.yaml"]  # as the harness does it, which also names the directory
    hook = agent.directory / "drain"
    hook.write_text(block("sh"))
    hook.chmod(0o755)
    policy = block("yaml").replace("/srv/try", str(agent.directory)).replace("8169", port)
    agent.config.write_text(policy.replace("9770", "0"))  # it may be taken here
    with running(simulate) as simulator:
        assert simulator.stdout is not None
        assert simulator.stdout.readline().startswith(f"vm-1  http://127.0.0.1:{port}/")
        agent.start()
        shown = subprocess.run(
            agent.command(*status), cwd=agent.directory, capture_output=True, text=True, check=False
        )
        assert shown.returncode == 0
        assert "vm-1" in shown.stdout
        agent.wait_log("closed")
        lines = [line["line"] for line in agent.log("hook output")]
        assert [re.sub(r"\d+", "N", line) for line in lines] == [
            "prepare for Reboot; seconds left: N",
            "recover for Reboot; seconds left: ?",
        ]
        simulator.stdout.read()
        assert simulator.wait(PATIENCE) == 0


@pytest.mark.parametrize("page", [PAGE, SIMULATOR_PAGE], ids=["cookbook", "simulator"])
def test_a_trial_agent_and_an_installed_one_share_nothing(page: str) -> None:
    tried = yaml.safe_load(block("yaml", page))["agent"]
    assert tried == {"listen": "127.0.0.1:9770", "state_dir": "/srv/try/state"}
    assert "--state-dir" not in page
    assert "status --config policy.yaml" in page
    assert "http://127.0.0.1:9770/" in page
    assert "http://127.0.0.1:9769" not in page
