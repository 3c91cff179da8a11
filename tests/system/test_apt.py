"""Two processes that need packages at the same time, with a stand-in for apt-get that fails beside another one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("apt is Debian's", allow_module_level=True)

APT_GET = """\
#!/bin/sh
set -eu
cd "${0%/*}"
mkdir locked || { echo "could not get the lock" >&2; exit 100; }
echo "$*" >>calls
sleep 0.3
for package in "$@"; do printf '#!/bin/sh\\n' >"./${package##*/}" && chmod +x "./${package##*/}"; done
rmdir locked
"""


def test_processes_that_need_packages_wait_for_each_other(tmp_path: Path) -> None:
    (tmp_path / "apt-get").write_text(APT_GET)
    (tmp_path / "apt-get").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    folder = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {folder!r}); import apt; print(apt.need(sys.argv[1]))"
    programs = ("first-program", "second-program")
    processes = [
        subprocess.Popen([sys.executable, "-c", code, name], env=environment, stdout=subprocess.PIPE, text=True)
        for name in programs
    ]
    said = [process.communicate(timeout=100)[0] for process in processes]
    assert said == [f"{tmp_path / name}\n" for name in programs]
    calls = (tmp_path / "calls").read_text().splitlines()
    option = "-oDPkg::Lock::Timeout=300 -oAcquire::Retries=5"
    assert (len(calls), set(calls)) == (
        4,
        {f"{option} update -q"} | {f"{option} install -qy --no-install-recommends {name}" for name in programs},
    )
