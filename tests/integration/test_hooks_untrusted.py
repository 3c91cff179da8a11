"""Texts of others in the variables of a hook: no shell evaluates them, and what should be a number is one."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("the hooks in sh are for Linux", allow_module_level=True)

from hook_machine import CALLS, run_hook
from hook_shells import CHECKOUT, SHIPPED_HOOKS, use_link

from scheduled_events_agent.hooks.run import attempt_environment, hook_environment
from scheduled_events_agent.imds.document import ScheduledEvent

pytestmark = pytest.mark.usefixtures("hook_shell")

# What docs/policy.md lists.
VARIABLES = re.findall(
    r"`([A-Z_]+)`",
    "".join(
        line.partition(":")[0]
        for line in (CHECKOUT / "docs/policy.md")
        .read_text("utf-8")
        .partition("### What a hook gets")[2]
        .partition("### ")[0]
        .splitlines()
        if line.startswith("- `")
    ),
)


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_no_hook_evaluates_a_variable(tmp_path: Path, call: tuple[str, ...]) -> None:
    owned = tmp_path / "owned"
    hostile = f"OPTIND[$(touch {owned}; echo 0)]"
    run_hook(tmp_path, call, variables={f"SCHEDULED_EVENT_{name}": hostile for name in VARIABLES})
    assert not owned.exists()


def after_run_hook(place: Path, lines: list[str]) -> dict[str, str]:
    """What a hook gets of the lines that the agent's account has written."""
    text = (CHECKOUT / "systemd/run-hook").read_text("utf-8")
    for path in ("/run/scheduled-events-agent", "/etc/scheduled-events-agent/hooks"):
        assert f'"{path}/' in text
        text = text.replace(f'"{path}/', f'"{place}/')
    script = place / "run-hook"
    script.write_text(text)
    script.chmod(0o755)
    (place / "hook-drain.env").write_text("\n".join([*lines, ""]), "utf-8")
    (place / "drain").symlink_to("/usr/bin/env")
    done = subprocess.run(
        [use_link(script), "drain"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def test_run_hook_exports_the_documented_variables_and_no_other(tmp_path: Path) -> None:
    owned = tmp_path / "owned"
    assert len(VARIABLES) == 14
    given = {name: "1" if "SECONDS" in name else f"$(touch {owned}) `id` \\n" for name in VARIABLES}
    lines = [f"SCHEDULED_EVENT_{name}={value}" for name, value in given.items()]
    others = [
        *(
            "SCHEDULED_EVENT_FOO=1",
            "SCHEDULED_EVENT_ID_=1",
            "SCHEDULED_EVENT_SECONDS=1",
            "SCHEDULED_EVENT_TYPE+=1",
        ),
        *(
            f"SCHEDULED_EVENT_ID[$(touch {owned})]=1",
            "PATH=/tmp",
            "BASH_ENV=/tmp/x",
            "SCHEDULED_EVENT_VM",
            "=1",
            "",
        ),
    ]
    seen = after_run_hook(tmp_path, [*others, *lines, *others])
    assert {name: seen[f"SCHEDULED_EVENT_{name}"] for name in VARIABLES} == given
    shell = {"PWD", "OLDPWD", "SHLVL", "_"}  # of bash
    assert seen.keys() - shell == {"PATH", "CREDENTIALS_DIRECTORY", *(f"SCHEDULED_EVENT_{n}" for n in VARIABLES)}
    assert seen["PATH"] == "/usr/bin:/bin"
    assert not owned.exists()


WHOLE = ["", "0", "7", "300", "9999999999"]
FRACTIONS = ["-1", "6.5", "0.25"]
OTHERS = ["00", "007", "10000000000", "-2", "+1", " 1", "1 ", "0x10", "1e+06", "6.", ".5", "6.5.1", "06.5", "1,5"]
OTHERS += ["OPTIND[$(id)]", "x", "1+1", "\u0663", "\u00b2", "-1.5", "1\r", "-"]


@pytest.fixture(params=["run-hook", "common.sh"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str, str], bool]:
    """Whether a variable with this value reaches the hook."""

    def is_kept(name: str, value: str) -> bool:
        if request.param == "run-hook":
            for old in tmp_path.iterdir():
                old.unlink()
            return after_run_hook(tmp_path, [f"{name}={value}"]).get(name) == value
        script = f'set -eu; . "{SHIPPED_HOOKS}/common.sh"; env'
        environment = {"PATH": os.environ["PATH"], name: value}
        done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=True)
        return f"\n{name}={value}\n" in f"\n{done.stdout}"

    return is_kept


@pytest.mark.parametrize("name", ["SECONDS_LEFT", "TIMEOUT_SECONDS", "DURATION_SECONDS"])
def test_a_variable_to_compute_with_has_one_form(kept: Callable[[str, str], bool], name: str) -> None:
    good = [*WHOLE, *(FRACTIONS if name == "DURATION_SECONDS" else [])]
    values = [*WHOLE, *FRACTIONS, *OTHERS]
    assert [value for value in values if kept(f"SCHEDULED_EVENT_{name}", value)] == good


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((None, "-1"), (0.0, "0"), (-0.0, "0"), (9.0, "9"), (6.5, "6.5"), (0.0001, "0"), (600.0, "600")),
        *((1_000_000.0, "1000000"), (31_536_000.0, "31536000"), (1 / 3, "0.333")),
    ],
)
def test_the_agent_writes_a_duration_in_this_form(
    kept: Callable[[str, str], bool], seconds: float | None, text: str
) -> None:
    event = ScheduledEvent(id="A", type="Freeze", status="Scheduled", duration_seconds=seconds)
    given = hook_environment(event, stage="prepare", rule=None, vm="", outcome="", seconds_left=None)
    assert given["SCHEDULED_EVENT_DURATION_SECONDS"] == text
    assert kept("SCHEDULED_EVENT_DURATION_SECONDS", text)


@pytest.mark.parametrize(("seconds", "text"), [(-5.0, "0"), (0.9, "0"), (299.9, "299"), (1e12, "9999999999")])
def test_the_agent_writes_the_time_left_in_this_form(seconds: float, text: str) -> None:
    event = ScheduledEvent(id="A", type="Freeze", status="Scheduled")
    given = hook_environment(event, stage="prepare", rule=None, vm="", outcome="", seconds_left=seconds)
    assert given["SCHEDULED_EVENT_SECONDS_LEFT"] == text
    assert attempt_environment(seconds) == {"SCHEDULED_EVENT_TIMEOUT_SECONDS": text}
