"""``make pictures`` can be run again, and makes the pictures that are there."""

import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the browser comes from Debian's packages", allow_module_level=True)

import apt
from container import CHECKOUT


def test_the_pictures_of_the_status_page_can_be_taken_again(tmp_path: Path) -> None:
    apt.need_root("mount")
    script = CHECKOUT / "tests/system/pictures.py"
    done = subprocess.run(
        [sys.executable, script, "--output", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    taken = {picture.name: picture.stat().st_size for picture in tmp_path.iterdir()}
    shown = {picture.name: picture.stat().st_size for picture in (CHECKOUT / "docs/pictures").glob("*.png")}
    assert taken == pytest.approx(shown, rel=0.2)  # other times and ids
