"""The shipped hooks on a machine without the program that they repeat until it succeeds."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are shell scripts for Linux", allow_module_level=True)

from hook_shells import SHIPPED_HOOKS

pytestmark = pytest.mark.usefixtures("hook_shell")
NEEDED = ("cat", "dirname", "hostname", "sed", "sh", "timeout", "tr")
REPEATING = sorted(
    hook
    for hook in SHIPPED_HOOKS.iterdir()
    if hook.suffix == "" and "\nask_for_a_minute " in hook.read_text("utf-8")
)


def test_some_hooks_repeat() -> None:
    assert "slurm-prepare" in {hook.name for hook in REPEATING}


@pytest.mark.parametrize("is_there", [False, True], ids=["absent", "not-executable"])
@pytest.mark.parametrize("hook", REPEATING, ids=lambda hook: hook.name)
def test_a_missing_program_fails_the_hook_at_once(hook: Path, tmp_path: Path, *, is_there: bool) -> None:
    """Without a second attempt, nor any wait: ``sleep`` is missing, too."""
    for name in NEEDED:
        program = shutil.which(name)
        assert program is not None
        (tmp_path / name).symlink_to(program)
    if is_there:
        (tmp_path / "scontrol").mkdir()
    done = subprocess.run(
        [hook],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"{hook.name}: scontrol is not on PATH"
    assert "is tried again" not in done.stderr
