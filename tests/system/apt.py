"""Provides packages of the distribution for tests: installed on this machine, or only unpacked.

Every call of apt-get that changes this machine is here (a container has its own). Invariant: one at a time.
The two halves of the tests in this folder run beside each other, and the later one of two apt-get at once fails,
whatever it was to do.
"""

import sys

if sys.platform == "win32":
    raise ImportError("apt is Debian's")

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_CACHE = Path(__file__).resolve().parents[2] / ".cache"
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def find(program: str) -> str | None:
    """Where a program is, also one for administrators; None: nowhere."""
    return shutil.which(program, path=_PATH)


def need(program: str, *packages: str) -> str:
    """Where a program is; of these packages (default: of its own name) if need be, or skips the test.

    No service that comes with them is started.
    """
    if found := find(program):
        return found
    with _locked(program):
        if not find(program):
            _apt_get("update", "-q")
            _apt_get("install", "-qy", "--no-install-recommends", *(packages or (program,)))
    found = find(program)
    assert found is not None, f"{program} is in none of {packages or program}"
    return found


def need_root(program: str) -> None:
    """Skip the test if this account cannot run the program as another one."""
    if os.geteuid() != 0:
        pytest.skip(f"{program} needs root here")


def unpack(into: Path, *packages: str, suite: str = "") -> None:
    """Have these packages unpacked in a folder of their own, with what they depend on and is missing here.

    ``suite``: of this release of Debian instead of this machine's own, with all that they depend on.
    """
    if into.exists():
        return
    with _locked(into.name):
        if into.exists():
            return
        fresh = into.with_name(f"{into.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        archives = fresh / "archives"
        (archives / "partial").mkdir(parents=True)
        options = (f"-oDir::Cache::archives={archives}", *(_only(suite, archives) if suite else ()))
        _apt_get(*options, "update", "-q")
        fetch = ("install", "-qy", "--download-only", "--reinstall", "--no-install-recommends")
        _apt_get(*options, *fetch, *packages)
        for package in archives.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(fresh)], check=True, timeout=120)
        shutil.rmtree(archives)
        fresh.rename(into)


def libraries(unpacked: Path) -> str:
    """The LD_LIBRARY_PATH that programs which were unpacked there need."""
    folders = [path for folder in ("lib", "usr/lib") for path in (unpacked / folder).glob("*-linux-gnu*")]
    return ":".join(str(path) for path in sorted(folders))


def mirror(distribution: str = "Debian") -> str:
    """Where this machine's apt gets its own release from, whatever its configuration; empty: it is another one."""
    os_release = Path("/etc/os-release").read_text("utf-8").splitlines()
    facts = dict(line.split("=", 1) for line in os_release if "=" in line)
    if facts.get("ID") != distribution.lower():
        return ""
    release = facts.get("VERSION_CODENAME", "")
    question = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(RELEASE) $(COMPONENT) $(REPO_URI)"]
    for is_fresh in (True, False):  # apt answers for what it has lists of
        done = subprocess.run([*question, "Created-By: Packages"], capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            if line.startswith(f"{distribution} {release} main "):
                return line.split()[-1]
        if is_fresh:
            with _locked("a list of packages"):
                _apt_get("update", "-q")
    return ""


def _only(suite: str, place: Path) -> list[str]:
    """Options of apt-get for a release of Debian, as if nothing of it were installed."""
    keys = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    url = mirror()
    if not url or not keys.exists():
        pytest.skip(f"packages of Debian {suite} can be fetched on a Debian only")
    (place / "sources.list").write_text(f"deb [signed-by={keys}] {url} {suite} main\n")
    (place / "status").touch()
    (place / "lists" / "partial").mkdir(parents=True)
    sources = (f"-oDir::Etc::SourceList={place}/sources.list", "-oDir::Etc::SourceParts=-")
    return [*sources, f"-oDir::State::Lists={place}/lists", f"-oDir::State::status={place}/status"]


@contextlib.contextmanager
def _locked(what: str) -> Iterator[None]:
    """With apt for ourselves among the tests, however many processes run them."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip(f"{what} is missing, and only root on Debian or Ubuntu can fetch it here")
    _CACHE.mkdir(exist_ok=True)
    with (_CACHE / "apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _apt_get(*arguments: str) -> None:
    # RUNLEVEL: in the one for rescue, packages start no service. The time limit is for what else uses apt here.
    environment = {**os.environ, "PATH": _PATH, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    command = ["apt-get", "-oDPkg::Lock::Timeout=300", "-oAcquire::Retries=5", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, f"{' '.join(command)}\nended with {done.returncode}\n{done.stdout}{done.stderr}"
