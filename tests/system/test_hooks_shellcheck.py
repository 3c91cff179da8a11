"""Every shell script that is shipped as a hook or for one, or that the cookbook shows, read by shellcheck."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are scripts for a Unix shell", allow_module_level=True)

import apt

ROOT = Path(__file__).resolve().parents[2]


def scripts() -> dict[str, str]:
    """Each script with where it stands."""
    folders = ("config/hooks", "systemd")
    shipped = [
        *(path for folder in folders for path in (ROOT / folder).iterdir()),
        *ROOT.glob("packaging/**/*.sh"),
    ]
    found = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in shipped}
    for page in (ROOT / "config/hooks/README.md", *(ROOT / "docs/cookbook").glob("*.md")):
        blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        found |= {f"{page.relative_to(ROOT)}, {index}": text for index, text in enumerate(blocks)}
    return {
        place: text for place, text in found.items() if text.startswith(("#!/bin/sh\n", "# shellcheck shell=sh\n"))
    }


SCRIPTS = scripts()


@pytest.fixture(scope="module")
def shellcheck() -> str:
    """The program, installed if it is missing."""
    return apt.need("shellcheck")


def complaints(program: str, script: str) -> str:
    command = [program, "--shell=sh", "--severity=style", "--format=gcc", "--external-sources", "-"]
    return subprocess.run(
        command, input=script, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    ).stdout


@pytest.mark.parametrize("place", sorted(SCRIPTS))
def test_shellcheck_reports_nothing(shellcheck: str, place: str) -> None:
    assert complaints(shellcheck, SCRIPTS[place]) == ""


def test_shellcheck_would_report_a_variable_without_quotes(shellcheck: str) -> None:
    assert "[SC2086]" in complaints(shellcheck, "#!/bin/sh\nset -eu\nrm -rf $1\n")


def test_the_hooks_of_the_examples_are_among_them() -> None:
    hooks = {f"config/hooks/{name}" for name in ("common.sh", "nginx-prepare", "ci-runner-prepare")}
    assert {*hooks, "systemd/run-hook", "systemd/run-as-root"} <= set(SCRIPTS)


def test_a_hook_without_its_shared_files_names_the_missing_one(tmp_path: Path) -> None:
    alone = shutil.copy(ROOT / "config/hooks/nginx-prepare", tmp_path)
    done = subprocess.run([alone], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert f"{tmp_path}/common.sh" in done.stderr
