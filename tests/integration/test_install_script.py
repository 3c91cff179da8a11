"""packaging/cloud-init/install.sh, as far as it goes without changing this machine."""

import functools
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the script is for Linux", allow_module_level=True)
if Path("/usr/bin/scheduled-events-agent").exists():
    pytest.skip("the script would use the agent that is installed here", allow_module_level=True)

SCRIPT = Path(__file__).parents[2] / "packaging/cloud-init/install.sh"
NEEDED = ("cat", "chmod", "grep", "mktemp", "realpath", "rm", "sh", "sha256sum", "touch")


class Files(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing: the address is part of the test."""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Where the files in ``tmp_path`` are."""
    with HTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def run(tmp_path: Path, *arguments: str, **programs: str) -> subprocess.CompletedProcess[str]:
    """Run it for root on a system that has these package managers, each a line of shell."""
    place = tmp_path / "bin"
    place.mkdir()
    for name in NEEDED:
        found = shutil.which(name, path="/usr/bin:/bin")
        assert found is not None, name
        (place / name).symlink_to(found)
    own = {"id": "echo 0", "sleep": "echo sleeps", "python3": f'exec "{sys.executable}" "$@"'}
    for name, text in {**own, **programs}.items():
        (place / name.replace("_", "-")).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (place / name.replace("_", "-")).chmod(0o755)
    return subprocess.run(
        ["sh", str(SCRIPT), *arguments],
        env={"PATH": str(place), "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        umask=0o077,
    )


def test_a_token_in_the_address_is_not_shown(tmp_path: Path, address: str) -> None:
    (tmp_path / "agent.rpm").write_text("another package")
    done = run(tmp_path, f"{address}/agent.rpm?sig=a-token", "0" * 64)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"install.sh: {address}/agent.rpm: its SHA-256 is not {'0' * 64}"
    assert "a-token" not in done.stdout + done.stderr


@pytest.mark.parametrize("code", [0, 106])
def test_a_repository_that_zypper_skipped_ends_nothing(tmp_path: Path, code: int) -> None:
    (tmp_path / "agent.rpm").write_text("a package")
    done = run(tmp_path, "agent.rpm", zypper=f"exit {code}")
    # It goes on with the command of the agent, which this zypper did not install.
    assert done.returncode == 127
    assert "/usr/bin/scheduled-events-agent" in done.stderr


def test_a_package_that_zypper_did_not_install_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "agent.rpm").write_text("a package")
    done = run(tmp_path, "agent.rpm", zypper="exit 104")
    assert (done.returncode, done.stderr) == (1, "install.sh: zypper did not install agent.rpm\n")


def test_the_umask_of_root_does_not_keep_others_from_what_is_installed(tmp_path: Path) -> None:
    (tmp_path / "agent.rpm").write_text("a package")
    assert int(run(tmp_path, "agent.rpm", zypper="umask; exit 104").stdout, 8) == 0o022


LOCKED = "echo 'E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (apt-get)' >&2; exit 100"
LOCKED_ONCE = f"if [ -e locked ]; then touch lists; else touch locked; {LOCKED}; fi"


@pytest.mark.parametrize(
    ("update", "code", "sleeps"),
    [("touch lists", 127, 0), (LOCKED_ONCE, 127, 1), (LOCKED, 1, 59), ("exit 100", 1, 0)],
)
def test_a_new_machine_fetches_the_list_of_what_the_package_depends_on(
    tmp_path: Path, update: str, code: int, sleeps: int
) -> None:
    """Another may hold the lock of the lists just then."""
    (tmp_path / "agent.deb").write_text("a package")
    apt_get = f"case $* in *update) {update} ;; *) [ -e lists ] || exit 100 ;; esac"
    done = run(tmp_path, "agent.deb", apt_get=apt_get)
    assert (done.returncode, done.stdout.count("sleeps")) == (code, sleeps)  # 127: it goes on, as above


def test_zypper_waits_for_another_one(tmp_path: Path) -> None:
    """While a machine is set up: without this it ends at once, with exit code 7."""
    (tmp_path / "agent.rpm").write_text("a package")
    assert run(tmp_path, "agent.rpm", zypper='echo "$ZYPP_LOCK_TIMEOUT"').stdout == "600\n"
