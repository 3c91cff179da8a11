"""Starts of an agent whose policy file is bad: which go on with the policy accepted last, and which fail."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from harness import PATIENCE, Agent, Simulator

if sys.platform == "win32":
    pytest.skip("a reload is a signal here, and root is an owner", allow_module_level=True)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="without root, it is a warning")
RULE = {"name": "accepted", "when": {"type": "Reboot"}, "prepare": ["drain"], "recover": ["resume"]}
IN_FORCE = "the policy file is rejected; in force is the policy accepted at "


def accepted_file(agent: Agent) -> Path:
    return agent.state_dir / "accepted-policy.json"


def write(agent: Agent, approve: str = "when-prepared", mode: str = "act") -> None:
    agent.write_policy(
        rules=[{**RULE, "approve": approve}], hooks=agent.hooks("drain", "resume"), agent={"mode": mode}
    )


def write_bad(agent: Agent) -> None:
    """Make the policy file bad, as a deployment or an edit does."""
    write(agent, "when-perpared")


def wait_accepted(agent: Agent) -> dict[str, Any]:
    """Wait until what is kept is the policy file; returns it."""

    def kept() -> dict[str, Any]:
        found: dict[str, Any] = (
            json.loads(accepted_file(agent).read_text()) if accepted_file(agent).exists() else {}
        )
        content = agent.config.read_bytes()
        return found if found.get("text", "").encode() == content else {}

    return agent.wait_until(kept, "the accepted policy was kept")


def reject_while_running(agent: Agent) -> None:
    """Have a running agent reject the file as it is now."""
    bad = agent.config.read_text()
    write(agent)
    agent.start()
    wait_accepted(agent)
    agent.config.write_text(bad)
    agent.reload()
    agent.wait_metric(0, "config_last_reload_successful")
    agent.stop()


def change_kept(agent: Agent, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    kept = json.loads(accepted_file(agent).read_text())
    accepted_file(agent).write_text(json.dumps({**kept, **change(kept)}))


def unknown_key(kept: dict[str, Any]) -> dict[str, Any]:
    text = f"{kept['text']}key-of-another-version: 1\n"
    return {"text": text, "hash": sha256(text.encode()).hexdigest()}


def bad_after_a_boot(agent: Agent) -> None:
    write_bad(agent)
    agent.forget_boot()


def rejected_before(agent: Agent) -> None:
    write_bad(agent)
    reject_while_running(agent)


def other_than_rejected_before(agent: Agent) -> None:
    rejected_before(agent)
    write(agent, "whenprepared")


def new_after_a_start_with_the_accepted_one(agent: Agent) -> None:
    bad_after_a_boot(agent)
    agent.start()
    agent.wait_until(lambda: json.loads(accepted_file(agent).read_text())["rejected"], "it was remembered")
    agent.stop()
    write(agent, "whenprepared")


def unreadable(agent: Agent) -> None:
    agent.config.unlink()
    agent.config.mkdir()


def unreadable_after_a_boot(agent: Agent) -> None:
    unreadable(agent)
    agent.forget_boot()


def unreadable_when_rejected_before(agent: Agent) -> None:
    agent.start()
    wait_accepted(agent)
    unreadable(agent)
    agent.reload()
    agent.wait_metric(0, "config_last_reload_successful")
    agent.stop()


def a_circle_of_links_after_a_boot(agent: Agent) -> None:
    agent.config.unlink()
    agent.config.symlink_to(agent.config)
    agent.forget_boot()


def gone_after_a_boot(agent: Agent) -> None:
    agent.config.unlink()
    agent.forget_boot()


def of_another_owner(agent: Agent) -> None:
    bad_after_a_boot(agent)
    os.chown(agent.config, 1234, 1234)


def open_to_all(agent: Agent) -> None:
    bad_after_a_boot(agent)
    agent.config.chmod(0o666)


def with_an_open_hook(agent: Agent) -> None:
    bad_after_a_boot(agent)
    agent.hook_file.chmod(0o777)


def at_another_path(agent: Agent) -> None:
    agent.config = agent.directory / "other.yaml"
    bad_after_a_boot(agent)


def with_another_state_directory(agent: Agent) -> None:
    bad_after_a_boot(agent)
    agent.state_dir = agent.directory / "other"


def moved_to_another_state_directory(agent: Agent) -> None:
    bad_after_a_boot(agent)
    agent.state_dir = agent.state_dir.rename(agent.directory / "other")


def with_one_of_another_version(agent: Agent) -> None:
    bad_after_a_boot(agent)
    change_kept(agent, unknown_key)


def with_one_that_was_changed(agent: Agent) -> None:
    bad_after_a_boot(agent)
    change_kept(agent, lambda kept: {"text": kept["text"] + "\n"})


def with_one_that_is_no_json(agent: Agent) -> None:
    bad_after_a_boot(agent)
    accepted_file(agent).write_text("{")


def with_one_that_others_could_write(agent: Agent) -> None:
    bad_after_a_boot(agent)
    accepted_file(agent).chmod(0o666)


def with_none(agent: Agent) -> None:
    bad_after_a_boot(agent)
    accepted_file(agent).unlink()


def observing_beside_the_error(agent: Agent) -> None:
    write(agent, "when-perpared", "observe")
    agent.forget_boot()


def observing_with_an_error_in_the_mode(agent: Agent) -> None:
    write(agent, mode="obsreve")
    agent.forget_boot()


def observing_beside_an_error_of_syntax(agent: Agent) -> None:
    write(agent, mode="observe")
    agent.config.write_text(f"{agent.config.read_text()}rules: [\n")
    agent.forget_boot()


STARTS: dict[str, tuple[Callable[[Agent], None], str, tuple[str, ...]]] = {
    # Mode of the agent that runs then, or "" if the start fails with exit code 2; options.
    "new": (write_bad, "", ()),
    "new after a boot": (bad_after_a_boot, "act", ()),
    "rejected before": (rejected_before, "act", ()),
    "other than rejected before": (other_than_rejected_before, "", ()),
    "new after a start with the accepted one": (new_after_a_start_with_the_accepted_one, "", ()),
    "unreadable": (unreadable, "", ()),
    "unreadable after a boot": (unreadable_after_a_boot, "act", ()),
    "unreadable when rejected before": (unreadable_when_rejected_before, "act", ()),
    "a circle of links after a boot": (a_circle_of_links_after_a_boot, "act", ()),
    "gone after a boot": (gone_after_a_boot, "", ()),
    "of another owner": (of_another_owner, "", ()),
    "open to all": (open_to_all, "", ()),
    "with an open hook": (with_an_open_hook, "", ()),
    "at another path": (at_another_path, "", ()),
    "with another state directory": (with_another_state_directory, "", ()),
    "moved to another state directory": (moved_to_another_state_directory, "", ()),
    "with one of another version": (with_one_of_another_version, "", ()),
    "with one that was changed": (with_one_that_was_changed, "", ()),
    "with one that is no JSON": (with_one_that_is_no_json, "", ()),
    "with one that others could write": (with_one_that_others_could_write, "", ()),
    "with none": (with_none, "", ()),
    "with --observe": (bad_after_a_boot, "observe", ("--observe",)),
    "observing beside the error": (observing_beside_the_error, "observe", ()),
    "observing with an error in the mode": (observing_with_an_error_in_the_mode, "observe", ()),
    "observing beside an error of syntax": (observing_beside_an_error_of_syntax, "observe", ()),
}
OF_ROOT = ("of another owner", "open to all", "with an open hook")


@pytest.mark.parametrize(
    "start", [pytest.param(name, marks=needs_root) if name in OF_ROOT else name for name in STARTS]
)
def test_a_start_with_a_bad_policy(sim: Simulator, agent: Agent, start: str) -> None:
    change, mode, options = STARTS[start]
    write(agent)
    agent.start()
    kept = wait_accepted(agent)
    agent.stop()
    change(agent)
    agent.start(*options, is_awaited=False)
    if not mode:
        assert agent.wait_exit() == 2
        assert agent.why_not()
        assert not agent.log("agent started")
        return
    assert agent.wait_log("agent started")["mode"] == mode
    first = agent.lines[0]
    assert (first["level"], first["message"].startswith(IN_FORCE)) == ("error", True)
    status = agent.status()
    assert (status["mode"], status["rules"]) == (mode, ["accepted"])
    policy = status["policy"]
    assert (policy["hash"], policy["rejected"], policy["next_start_failure"]) == (
        kept["hash"],
        first["reason"],
        "",
    )
    agent.wait_metric(0, "config_last_reload_successful")
    (found,) = status["attention"]
    assert (found["kind"], found["severity"]) == ("policy_rejected", "fix")
    assert found["consequence"].startswith("In force is the policy accepted at ")
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_log("seen", event_id=event)
    if mode == "act":
        sim.wait_approved(event)
        assert agent.ran() == ["drain"]


def test_a_start_with_a_bad_policy_and_a_kept_one_that_is_bad_too_says_what_is_wrong_with_both(
    agent: Agent,
) -> None:
    write(agent)
    agent.start()
    wait_accepted(agent)
    agent.stop()
    with_one_of_another_version(agent)
    agent.start(is_awaited=False)
    assert agent.wait_exit() == 2
    of_file, of_kept = agent.why_not()
    assert of_file.startswith(f"{agent.config}:")
    assert 'got "when-perpared"' in of_file
    assert of_kept.startswith("the policy accepted at ")
    assert 'unknown key "key-of-another-version"' in of_kept


@needs_root
@pytest.mark.parametrize("is_open", [False, True])
def test_a_file_that_cannot_be_found_may_be_replaced_by_no_other_account(agent: Agent, *, is_open: bool) -> None:
    agent.config = agent.directory / "etc" / "policy.yaml"
    agent.config.parent.mkdir()
    write(agent)
    agent.start()
    wait_accepted(agent)
    agent.stop()
    a_circle_of_links_after_a_boot(agent)
    agent.config.parent.chmod(0o777 if is_open else 0o755)
    agent.start(is_awaited=False)
    if is_open:
        assert agent.wait_exit() == 2
        assert f"{agent.config.parent} can be changed by every account" in agent.why_not()[1]
    else:
        agent.wait_log("agent started")


def test_an_agent_recovers_after_the_reboot_that_it_approved_under_a_rejected_policy(
    sim: Simulator, agent: Agent
) -> None:
    write(agent)
    agent.start()
    write_bad(agent)
    agent.reload()
    agent.wait_metric(0, "config_last_reload_successful")
    event = sim.schedule("Reboot", lasts_seconds=None)
    sim.wait_approved(event)
    agent.wait_log("started", event_id=event)  # until then, a reboot has it prepare again
    agent.kill()
    agent.forget_boot()
    agent.start()
    assert agent.lines[0]["message"].startswith(IN_FORCE)
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    assert agent.ran() == ["drain", "resume"]
    assert agent.is_ready()
    doctor = agent.run("doctor", "--config", str(agent.config), "--state-dir", str(agent.state_dir))
    assert "with the policy accepted at " in doctor.stdout
    # The corrected file is put into force, and is the one that is kept.
    write(agent)
    agent.reload()
    agent.wait_metric(1, "config_last_reload_successful")
    assert agent.status()["attention"] == []
    assert wait_accepted(agent)["rejected"] is None


def test_a_person_at_a_terminal_gets_the_errors_and_no_older_policy(agent: Agent) -> None:
    write(agent)
    agent.start()
    wait_accepted(agent)
    agent.stop()
    bad_after_a_boot(agent)
    master, slave = os.openpty()
    command = agent.command("run", "--config", str(agent.config), "--state-dir", str(agent.state_dir))
    try:
        done = subprocess.run(command, stdin=slave, stdout=slave, stderr=slave, timeout=PATIENCE, check=False)
        assert done.returncode == 2
        assert "when-perpared" in os.read(master, 65536).decode()
    finally:
        os.close(master)
        os.close(slave)
