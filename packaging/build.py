"""Builds the packages for Linux and the Helm chart: ``build.py deb|rpm|helm`` writes them to dist/.

One tree is staged per architecture, and both formats pack that tree. How the agent runs is not decided here.
Invariant: the same sources and tools (Python, dpkg, rpm) give the same bytes, whatever the place, the hour or the
umask.

    packaging/build.py deb                       dist/scheduled-events-agent_VERSION-1_{amd64,arm64}.deb
    packaging/build.py rpm                       dist/scheduled-events-agent-VERSION-1.{x86_64,aarch64}.rpm
    packaging/build.py helm                      dist/scheduled-events-agent-VERSION.tgz
    packaging/build.py deb --version 0.2.0       the same sources under another version
    (each with NAME.cdx.json beside it, which lists what the package contains)
    packaging/build.py renew                     the newest dependencies into requirements.txt and tools.txt

The dependencies are wheels from the package index, pinned by version and hash, and kept in .cache/packaging.
"""  # noqa: INP001 - a script

import argparse
import contextlib
import fcntl
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email import message_from_bytes
from email.utils import format_datetime
from pathlib import Path

if sys.platform == "win32":
    raise ImportError("packages for Linux are built on Linux")

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bom import Part, write_bom

SOURCES = Path(__file__).resolve().parents[1]
PACKAGING = SOURCES / "packaging"
CACHE = SOURCES / ".cache" / "packaging"
NAME = "scheduled-events-agent"
PROJECT = tomllib.loads((SOURCES / "pyproject.toml").read_text("utf-8"))["project"]
AUTHOR: str = PROJECT["authors"][0]["name"]
URLS: dict[str, str] = PROJECT["urls"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SYSTEMD = "245"  # tests/unit/test_systemd_directives.py holds the units against it
HOME = f"usr/lib/{NAME}"  # where the agent and what it needs lie in the tree
_DOC = f"usr/share/doc/{NAME}"
_TOOLS = ("shtab", "hatchling")  # what makes the completions, and what builds sdist and wheel
# Names that are no licence of SPDX, and what they mean.
_LICENSES = {"PSF": "PSF-2.0"}
# Unattended upgrades may hold apt's locks for minutes.
_LOCK_TIMEOUT_SECONDS = 300.0
_LOCK_RETRY_SECONDS = 1.0
# Programs that pack a format: the program, and the package that has it on Debian and on Fedora.
_PROGRAMS = {
    "deb": (("dpkg-deb", "dpkg", "dpkg"),),
    "rpm": (("rpmbuild", "rpm", "rpm-build"),),
    "msi": (
        ("wixl", "wixl", "msitools"),
        ("msibuild", "msitools", "msitools"),
        ("x86_64-w64-mingw32-windmc", "binutils-mingw-w64-x86-64", "mingw64-binutils"),
    ),
    "repository": (
        ("apt-ftparchive", "apt-utils", "apt-utils"),
        ("createrepo_c", "createrepo-c", "createrepo_c"),
        ("rpmsign", "rpm", "rpm-sign"),
        ("gpg", "gpg", "gnupg2"),
        ("gpg-agent", "gpg-agent", "gnupg2"),
    ),
}
# Parts of a wheel that are not needed at run time, as its tests are not: hints for type checkers, and how it was
# built and is installed.
_UNNEEDED = (
    ".pyi",
    "/py.typed",
    ".dist-info/RECORD",
    ".dist-info/WHEEL",
    ".dist-info/LICENSE",
    ".dist-info/top_level.txt",
)
# Libraries that httpx imports besides httpcore. (It also names anyio, which only asynchronous clients need.)
IMPORTED_BY_HTTPX = ("certifi", "h11", "idna")
# Folders of the sources, and their places in a package.
_FOLDERS = {
    "docs": _DOC,
    "config/examples": f"{_DOC}/examples",
    "config/hooks": f"usr/share/{NAME}/hooks",
    "config/prometheus": f"usr/share/{NAME}/prometheus",
    "systemd": f"usr/share/{NAME}/systemd",
}
# Single files: where each is in the tree, and its mode.
_PLACES = {
    "packaging/launcher.sh": (f"usr/bin/{NAME}", 0o755),
    "packaging/interpreter.sh": (f"{HOME}/interpreter.sh", 0o644),
    "packaging/bytecode.sh": (f"{HOME}/bytecode.sh", 0o755),
    "packaging/removal.sh": (f"{HOME}/removal.sh", 0o755),
    "packaging/start.py": (f"{HOME}/start.py", 0o644),
    "config/policy.yaml": (f"etc/{NAME}/policy.yaml", 0o644),
    "config/policy.schema.json": (f"usr/share/{NAME}/policy.schema.json", 0o644),
    f"systemd/{NAME}.service": (f"usr/lib/systemd/system/{NAME}.service", 0o644),
    f"systemd/{NAME}-hook@.service": (f"usr/lib/systemd/system/{NAME}-hook@.service", 0o644),
    "packaging/preset": (f"usr/lib/systemd/system-preset/80-{NAME}.preset", 0o644),
    "systemd/sysusers.conf": (f"usr/lib/sysusers.d/{NAME}.conf", 0o644),
    "systemd/tmpfiles.conf": (f"usr/lib/tmpfiles.d/{NAME}.conf", 0o644),
}
# Directories that an rpm knows and does not bring, with mode, owner and group: systemd makes them.
_GHOSTS = {f"/etc/{NAME}/credentials": f"0750,root,{NAME}", f"/var/lib/{NAME}": "0700,root,root"}
RUNBOOK = SOURCES / "docs/runbook.md"
# What the chart has from elsewhere: where it is in the sources, and in the chart.
_IN_CHART = {
    "config/examples/kubernetes-node.yaml": "policies/kubernetes.yaml",
    "config/examples/aks-node.yaml": "policies/aks.yaml",
    "config/prometheus/rules.yaml": "prometheus/rules.yaml",
    "LICENSE": "LICENSE",
}
# Files that links in documents may point to besides the folders.
_LINKED = {source: f"/{target}" for source, (target, _) in _PLACES.items()} | {
    "README.md": f"/{_DOC}/README.md",
    "SECURITY.md": f"/{_DOC}/SECURITY.md",
    "config/hooks/README.md": f"/etc/{NAME}/hooks/README.md",
    "agent/scheduled_events_agent/__init__.py": f"/{HOME}/scheduled_events_agent/__init__.py",
}


class BuildError(Exception):
    """The build cannot go on: what is missing or went wrong, and what to do."""


def is_placeholder(address: str) -> bool:
    """Whether the address, of a page or for mail, is one that an owner has still to fill in."""
    return address.rpartition("//")[2].partition("/")[0].endswith(".invalid")


def filled_in(address: str) -> str:
    """The address, or "" as long as it is a placeholder: what is built leads to none."""
    return "" if is_placeholder(address) else address


EMAIL = filled_in(PROJECT["authors"][0]["email"])
MAINTAINER = f"{AUTHOR} <{EMAIL}>" if EMAIL else AUTHOR
HOMEPAGE = filled_in(URLS["Homepage"])

# Debian's names of the processors, and those of rpm and of wheels.
ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Distribution:
    """A vendored distribution, and the texts of its licence by file name."""

    name: str
    version: str
    license: str  # an expression of SPDX
    texts: Mapping[str, str]
    wheels: tuple[tuple[str, str], ...] = ()  # the files that it came in, and their SHA-256

    def parts(self) -> Iterator[Part]:
        """What it adds to a bill of materials: each of its wheels, or itself if it came in another's."""
        if not self.wheels:
            yield Part(self.name, self.version, f"pkg:generic/{self.name}", self.license)
        for file, sha256 in self.wheels:
            purl = f"pkg:pypi/{self.name.lower().replace('_', '-')}@{self.version}?file_name={file}"
            yield Part(self.name, self.version, purl, self.license, sha256)


@dataclass(frozen=True)
class Staged:
    """A tree that is ready to be packed, every file with its final mode and time."""

    root: Path
    architecture: str  # as Debian calls it
    version: str
    epoch: int  # seconds; no file is younger
    glibc: str  # the C library that the compiled modules need at least
    vendored: tuple[Distribution, ...]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="packaging/build.py", description="Builds the packages and the chart.")
    parser.add_argument("what", choices=("deb", "rpm", "helm", "stage", "renew"), help="what to build")
    parser.add_argument("--version", help="build under this version (default: that of the sources)")
    parser.add_argument(
        "--architecture",
        choices=[*ARCHITECTURES, *ARCHITECTURES.values()],
        help="for this one only (default: both)",
    )
    parser.add_argument("--output", metavar="DIR", type=Path, default=SOURCES / "dist", help="default: dist")
    options = parser.parse_args(arguments)
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        if options.what == "renew":
            renew()
            return 0
        check_version(options.version)
        if options.what == "helm":
            print(pack_chart(options.output, options.version))
            return 0
        for architecture, machine in ARCHITECTURES.items():
            if options.architecture in (None, architecture, machine):
                print(build(options.what, architecture, options.version, options.output))
    except BuildError as error:
        print(f"packaging/build.py: {error}", file=sys.stderr)
        return 1
    return 0


def build(what: str, architecture: str, version: str | None, output: Path) -> Path:
    """Stage and pack; returns the package, or the tree if that is all that is wanted."""
    need_programs(what)
    output.mkdir(parents=True, exist_ok=True)
    if what == "stage":
        return stage(architecture, output / ARCHITECTURES[architecture], version).root
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as directory:
        staged = stage(architecture, Path(directory) / "tree", version)
        package = pack_deb(staged, output) if what == "deb" else pack_rpm(staged, output)
    parts = [part for distribution in staged.vendored for part in distribution.parts()]
    write_bom(package, product(staged.version), staged.epoch, parts)
    return package


def product(version: str) -> Part:
    """The agent, as a bill of materials names it."""
    return Part(NAME, version, f"pkg:generic/{NAME}@{version}", PROJECT["license"])


def need_programs(what: str) -> None:
    """Have what packs the format; root on Debian or Ubuntu gets it installed. Raises BuildError."""
    for program, debian, fedora in _PROGRAMS.get(what, ()):
        if shutil.which(program):
            continue
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            raise BuildError(
                f"a {what} is packed with {program}, which is not here; install it (Debian and Ubuntu: "
                f"apt-get install {debian}; Fedora and RHEL: dnf install {fedora})"
            )
        for command in (["update", "-q"], ["install", "-qy", "--no-install-recommends", debian]):
            _apt_get(command)


def _apt_get(command: list[str]) -> None:
    """Wait for another apt: by itself, apt-get waits for some of its locks at most."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    give_up_at = time.monotonic() + _LOCK_TIMEOUT_SECONDS
    while True:
        try:
            run(["apt-get", *command], env=environment)
        except BuildError as error:
            if not re.search(r"\block\b", str(error)) or time.monotonic() > give_up_at:
                raise
            time.sleep(_LOCK_RETRY_SECONDS)
        else:
            return


# --- The tree -------------------------------------------------------------------------------------------------


def stage(architecture: str, root: Path, version: str | None = None) -> Staged:
    """Lay out at ``root`` what both formats pack; whatever was there is replaced."""
    version = version or source_version()
    epoch = source_epoch()
    wheels = fetch_wheels(architecture)
    tools = _tools()
    shutil.rmtree(root, ignore_errors=True)
    vendored = _vendor(wheels, root)
    _place_agent(root, version)
    _place_files(root)
    _place_documents(root)
    _name_program(root)
    _generate_from_parser(root, tools, version, epoch)
    _place_licenses(root, vendored)
    glibc = _needed_glibc(root / HOME)
    _settle(root, epoch)
    return Staged(root, architecture, version, epoch, glibc, vendored)


def source_epoch() -> int:
    """The time that files get: $SOURCE_DATE_EPOCH, else that of the last commit."""
    if epoch := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(epoch)
    try:
        return int(run(["git", "-C", str(SOURCES), "log", "-1", "--format=%ct"]))
    except (OSError, BuildError) as error:
        raise BuildError("this is no git checkout: set SOURCE_DATE_EPOCH (seconds)") from error


def source_version() -> str:
    text = (SOURCES / "agent/scheduled_events_agent/__init__.py").read_text("utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if not found:
        raise BuildError(
            'agent/scheduled_events_agent/__init__.py: expected a line __version__ = "...", found none'
        )
    return found[1]


def check_version(version: str | None) -> None:
    if version is not None and not re.fullmatch(r"\d+(\.\d+)+((a|b|rc)\d+)?", version):
        raise BuildError(f"--version: expected one such as 0.2.0 or 0.2.0rc1; got {version!r}")


def package_version(version: str) -> str:
    """The version as dpkg and rpm order it: they have 0.2.0rc1 after 0.2.0, and 0.2.0~rc1 before it."""
    return re.sub(r"(?<=\d)(a|b|rc)", r"~\1", version)


def build_python(output: Path) -> list[Path]:
    """Build sdist and wheel with the pinned build backend; returns them."""
    output.mkdir(parents=True, exist_ok=True)
    python = _tools() / "bin/python"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(source_epoch()), "LC_ALL": "C.UTF-8"}
    command = [str(python), "-m", "hatchling", "build", "--target", "sdist", "--target", "wheel"]
    run([*command, "--directory", str(output)], env=environment, cwd=SOURCES)
    base = f"{NAME.replace('-', '_')}-{source_version()}"
    return [output / f"{base}.tar.gz", output / f"{base}-py3-none-any.whl"]


def _vendor(wheels: Iterable[Path], root: Path) -> tuple[Distribution, ...]:
    """Unpack the wheels: those for every Python once, others into a directory for each ABI."""
    found = {"libyaml": find_libyaml()}
    for wheel in sorted(wheels):
        python, abi = wheel.stem.split("-")[2:4]
        place = HOME if abi in ("none", "abi3") else f"{HOME}/{python}"
        distribution, files = read_wheel(wheel)
        for name, content in files.items():
            write(root / place / name, content)
        earlier = found[distribution.name].wheels if distribution.name in found else ()
        found[distribution.name] = replace(distribution, wheels=(*earlier, *distribution.wheels))
    return tuple(found[name] for name in sorted(found, key=str.lower))


def read_wheel(wheel: Path) -> tuple[Distribution, dict[str, bytes]]:
    """Read a wheel: its name and version, and those of its files that are needed to run."""
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in sorted(archive.namelist()) if not name.endswith("/")}
    (about,) = (content for name, content in contents.items() if name.endswith(".dist-info/METADATA"))
    metadata = message_from_bytes(about)
    texts = {}
    for name, content in contents.items():
        match = re.search(r"\.dist-info/(?:licenses/(.+)|(LICENSE[^/]*))$", name)
        if match:
            texts[(match[1] or match[2]).replace("/", "-")] = content.decode("utf-8")
    texts |= _licenses_in_modules({name: content for name, content in contents.items() if name.endswith(".py")})
    if not any("LICENSE" in name.upper() for name in texts):
        raise BuildError(f"{wheel.name}: expected its licence inside, found none")
    files = {
        name: content
        for name, content in contents.items()
        if not name.endswith(_UNNEEDED) and "/tests/" not in name and ".dist-info/licenses/" not in name
    }
    name = str(metadata["Name"])
    license_name = str(metadata["License-Expression"] or metadata["License"])
    license_name = _LICENSES.get(license_name, license_name)
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Distribution(name, str(metadata["Version"]), license_name, texts, ((wheel.name, sha256),)), files


def find_libyaml() -> Distribution:
    """The library that the wheels of PyYAML have compiled in, and do not speak of."""
    return Distribution("libyaml", "", "MIT", {"LICENSE": (PACKAGING / "licenses/libyaml").read_text("utf-8")})


def _licenses_in_modules(modules: Mapping[str, bytes]) -> dict[str, str]:
    """The opening comments of modules that came from elsewhere, and say so there."""
    found = {}
    for name, content in modules.items():
        comment = re.match(r"(?:#.*\n|\s*\n)*", content.decode("utf-8"))
        if comment and "Redistribution and use" in comment[0]:
            text = "\n".join(line.lstrip("#").removeprefix(" ") for line in comment[0].splitlines())
            found[name.rpartition("/")[2]] = text.strip() + "\n"
    return found


def _place_agent(root: Path, version: str) -> None:
    for source in sorted((SOURCES / "agent/scheduled_events_agent").rglob("*")):
        if source.is_file() and "__pycache__" not in source.parts and source.name != "py.typed":
            write(root / HOME / source.relative_to(SOURCES / "agent"), source.read_bytes())
    package = root / HOME / "scheduled_events_agent/__init__.py"
    edit(package, f'__version__ = "{source_version()}"', f'__version__ = "{version}"')


def _place_files(root: Path) -> None:
    for source, (target, mode) in _PLACES.items():
        copy(SOURCES / source, root / target, mode)
    policy = root / "etc" / NAME / "policy.yaml"
    edit(policy, "$schema=policy.schema.json", f"$schema=/usr/share/{NAME}/policy.schema.json")
    copy(policy, root / "usr/share" / NAME / "policy.yaml")  # what installs another one knows it by this
    hooks = root / "etc" / NAME / "hooks/README.md"
    write(hooks, _in_package(SOURCES / "config/hooks/README.md").encode())
    edit(hooks, "\nEach is for", f"\nThey are in `/usr/share/{NAME}/hooks/`. Each is for")


def _place_documents(root: Path) -> None:
    for name in ("README.md", "SECURITY.md"):
        write(root / _DOC / name, _in_package(SOURCES / name).encode())
    for folder, place in _FOLDERS.items():
        for source in sorted((SOURCES / folder).rglob("*")):
            if not source.is_file() or source == SOURCES / "config/hooks/README.md":  # it is in /etc
                continue
            target = root / place / source.relative_to(SOURCES / folder)
            if source.suffix == ".md" or folder == "config/examples":
                write(target, _in_package(source).encode())
            else:
                copy(source, target, mode=0o755 if os.access(source, os.X_OK) else 0o644)
            if source == RUNBOOK:
                copy(target, root / "usr/share" / NAME / source.name)  # some systems install no documents
            if folder == "config/examples":
                edit(target, "$schema=../policy.schema.json", f"$schema=/usr/share/{NAME}/policy.schema.json")


def _name_program(root: Path) -> None:
    share = f"usr/share/{NAME}/systemd"
    for place in (f"usr/lib/systemd/system/{NAME}.service", f"{share}/{NAME}.service", f"{share}/restart.sh"):
        edit(root / place, f"/usr/local/bin/{NAME}", f"/usr/bin/{NAME}")


def _in_package(page: Path) -> str:
    """A text that has links and commands name things by their places in the packages; other links are none."""

    def link(match: re.Match[str]) -> str:
        words, target, heading = match.groups(default="")
        if target == "" or "://" in target:
            return match[0]
        source = Path(os.path.normpath(page.parent / target)).relative_to(SOURCES).as_posix()
        place = _LINKED.get(source)
        for folder, its_place in _FOLDERS.items():
            if place is None and (source == folder or source.startswith(f"{folder}/")):
                place = f"/{its_place}{source.removeprefix(folder)}"
        return f"[{words}]({place}{heading})" if place else words

    text = re.sub(r"\[([^\]]+)\]\(([^)#\s]*)(#[^)\s]*)?\)", link, page.read_text("utf-8"))
    folders = "|".join(_FOLDERS)
    return re.sub(rf"(?<![\w./\[-])({folders})/(?=[\w-])", lambda match: f"/{_FOLDERS[match[1]]}/", text)


def _generate_from_parser(root: Path, tools: Path, version: str, epoch: int) -> None:
    """The man pages and the completions, from the grammar of the command line and the types of the policy."""
    python = str(tools / "bin/python")
    manuals = {"command": f"man8/{NAME}.8.gz", "policy": f"man5/{NAME}.5.gz"}
    completions = {
        "bash": f"usr/share/bash-completion/completions/{NAME}",
        "zsh": f"usr/share/zsh/vendor-completions/_{NAME}",
        "fish": f"usr/share/fish/vendor_completions.d/{NAME}.fish",
    }
    with tempfile.TemporaryDirectory() as path:
        # The staged agent alone: its dependencies there may be for another processor than this machine's.
        (Path(path) / "scheduled_events_agent").symlink_to((root / HOME / "scheduled_events_agent").resolve())
        environment = {"PATH": os.defpath, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"SOURCE_DATE_EPOCH": str(epoch), "LC_ALL": "C.UTF-8", "COLUMNS": "100"}
        for what, place in manuals.items():
            text = run([python, str(PACKAGING / "manual.py"), what, version, str(epoch)], env=environment)
            write(root / "usr/share/man" / place, _gzip(text.encode()))
        for shell, place in completions.items():
            command = [python, "-m", "shtab", "--shell", shell, "--error-unimportable"]
            grammar = [
                "--prefix",
                NAME.replace("-", "_"),
                "scheduled_events_agent.cli.completion.parser_with_completers",
            ]
            write(root / place, run([*command, *grammar], env=environment).encode())


def _place_licenses(root: Path, vendored: Iterable[Distribution]) -> None:
    """The texts as their authors wrote them; each format has a place of its own for them."""
    place = root / "usr/share/licenses" / NAME
    copy(SOURCES / "LICENSE", place / "LICENSE")
    for distribution in vendored:
        for name, text in distribution.texts.items():
            write(place / distribution.name / name, text.encode())


def _needed_glibc(directory: Path) -> str:
    needed = {
        (int(major), int(minor))
        for path in directory.rglob("*.so")
        for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)\b", path.read_bytes())
    }
    if not needed:
        raise BuildError(f"{directory}: expected compiled modules, found none")
    return ".".join(map(str, max(needed)))


def _settle(root: Path, epoch: int) -> None:
    """Final modes and times for everything, whatever the umask was."""
    for path in [*sorted(root.rglob("*"), reverse=True), root]:
        if path.is_dir():
            path.chmod(0o755)
        os.utime(path, (epoch, epoch))


def copy(source: Path, target: Path, mode: int = 0o644) -> None:
    write(target, source.read_bytes(), mode)


def write(target: Path, content: bytes, mode: int = 0o644) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    target.chmod(mode)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    if old not in text:
        raise BuildError(f"{path.name}: expected {old!r} in it, to be replaced; found it nowhere")
    path.write_text(text.replace(old, new), encoding="utf-8")


def _gzip(content: bytes) -> bytes:
    return gzip.compress(content, compresslevel=9, mtime=0)


# --- Wheels ---------------------------------------------------------------------------------------------------


def fetch_wheels(architecture: str) -> list[Path]:
    """The pinned wheels for every Python."""
    targets = [list(_targets(architecture, python)) for python in PYTHONS]
    return fetch_pinned(PACKAGING / "requirements.txt", ARCHITECTURES[architecture], targets)


def fetch_pinned(wanted: Path, name: str, targets: Iterable[Iterable[str]]) -> list[Path]:
    """The wheels of a file of requirements for each target, from the cache or the index.

    A target is pip's options for it; ``name`` stands for all of them in the cache. Each hash is checked, always.
    """
    hashes = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", wanted.read_text("utf-8")))
    digest = hashlib.sha256(wanted.read_bytes()).hexdigest()[:16]
    directory = CACHE / f"wheels-{name}-{digest}"
    with locked("wheels"):
        if not directory.exists():
            fresh = directory.with_suffix(".new")
            shutil.rmtree(fresh, ignore_errors=True)
            for options in targets:
                pip("download", *options, "--dest", str(fresh), "--requirement", str(wanted))
            fresh.rename(directory)
    wheels = sorted(directory.glob("*.whl"))
    for wheel in wheels:
        if hashlib.sha256(wheel.read_bytes()).hexdigest() not in hashes:
            place = wanted.relative_to(SOURCES)
            raise BuildError(f"{wheel}: its hash is not in {place}; remove it and try again")
    return wheels


def _targets(architecture: str, python: str) -> Iterator[str]:
    yield from ("--only-binary", ":all:", "--no-deps", "--implementation", "cp", "--python-version", python)
    yield from ("--abi", f"cp{python.replace('.', '')}", "--abi", "abi3", "--abi", "none")
    for system in ("manylinux2014", "manylinux_2_17", "manylinux_2_28"):
        yield from ("--platform", f"{system}_{ARCHITECTURES[architecture]}")


def _tools() -> Path:
    """An environment with the tools of the build and the agent's dependencies, all pinned; for this machine."""
    wanted = (PACKAGING / "requirements.txt", PACKAGING / "tools.txt")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in wanted) + sys.version.encode()).hexdigest()[:16]
    directory = CACHE / f"tools-{digest}"
    ready = directory / "ready"
    with locked("tools"):
        if not ready.exists():
            shutil.rmtree(directory, ignore_errors=True)
            venv.create(directory)
            requirements = [option for path in wanted for option in ("--requirement", str(path))]
            options = ("install", "--no-deps", "--only-binary", ":all:")
            pip("--python", str(directory / "bin/python"), *options, *requirements)
            ready.touch()
    return directory


def renew() -> None:
    """Write requirements.txt and tools.txt again, with the newest versions that pyproject.toml allows."""
    needed = [*(one for one in PROJECT["dependencies"] if "win32" not in one), *IMPORTED_BY_HTTPX]
    with tempfile.TemporaryDirectory() as directory:
        every = [_targets(architecture, python) for architecture in ARCHITECTURES for python in PYTHONS]
        for targets in every:
            pip("download", *targets, "--dest", f"{directory}/run", *needed, hashes=False)
        pip("download", "--only-binary", ":all:", "--dest", f"{directory}/tools", *_TOOLS, hashes=False)
        for folder, name, purpose in (
            ("run", "requirements.txt", "What the packages contain"),
            ("tools", "tools.txt", "What makes the completions, sdist and wheel"),
        ):
            target = PACKAGING / name
            lines = [f"# {purpose}; written by packaging/build.py renew.", *pins(Path(directory) / folder)]
            target.write_text("\n".join(lines) + "\n", encoding="utf-8")


def pins(directory: Path) -> Iterator[str]:
    pins: dict[str, list[str]] = {}
    for wheel in sorted(directory.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        pins.setdefault(f"{name.replace('_', '-')}=={version}", []).append(
            hashlib.sha256(wheel.read_bytes()).hexdigest()
        )
    for pin, hashes in pins.items():
        yield " \\\n".join([pin, *(f"    --hash=sha256:{value}" for value in sorted(hashes))])


def pip(*arguments: str, hashes: bool = True) -> None:
    required = ["--require-hashes"] if hashes else []
    run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments, *required])


# --- deb ------------------------------------------------------------------------------------------------------


def pack_deb(staged: Staged, output: Path) -> Path:
    """Pack the tree as a deb; returns its path. The tree gets the format's own files and is spent."""
    root = staged.root
    control = root / "DEBIAN"
    shutil.rmtree(root / "usr/share/licenses")
    write(root / _DOC / "copyright", debian_copyright(staged).encode())
    write(root / _DOC / "changelog.gz", _gzip((SOURCES / "CHANGELOG.md").read_bytes()))
    version = f"{package_version(staged.version)}-1"
    entry = (
        f"{NAME} ({version}) unstable; urgency=medium\n\n  * The changes are in changelog.gz.\n\n"
        f" -- {AUTHOR} <{EMAIL}>  {format_datetime(datetime.fromtimestamp(staged.epoch, UTC))}\n"
    )
    write(root / _DOC / "changelog.Debian.gz", _gzip(entry.encode()))
    copy(PACKAGING / "deb/lintian-overrides", root / "usr/share/lintian/overrides" / NAME)

    files = sorted(path for path in root.rglob("*") if path.is_file())
    values = {
        "VERSION": version,
        "ARCHITECTURE": staged.architecture,
        "MAINTAINER": MAINTAINER,
        "HOMEPAGE": HOMEPAGE,
        "SIZE": str(sum(-(-path.stat().st_size // 1024) for path in files)),
        "GLIBC": staged.glibc,
        "SYSTEMD": SYSTEMD,
    }
    write(control / "control", _fill((PACKAGING / "deb/control").read_text("utf-8"), values).encode())
    in_etc = [f"/{path.relative_to(root)}\n" for path in files if path.is_relative_to(root / "etc")]
    write(control / "conffiles", "".join(in_etc).encode())
    sums = (
        f"{hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()}  {path.relative_to(root)}\n"
        for path in files
        if not path.is_relative_to(root / "etc")
    )
    write(control / "md5sums", "".join(sums).encode())
    copy(PACKAGING / "deb/triggers", control / "triggers")
    for script in ("postinst", "prerm", "postrm"):
        copy(PACKAGING / "deb" / script, control / script, mode=0o755)
    _settle(root, staged.epoch)
    package = output / f"{NAME}_{staged.version}-1_{staged.architecture}.deb"
    # One thread: the way xz divides its work is part of the bytes.
    command = ["dpkg-deb", "--root-owner-group", "-Zxz", "--threads-max=1", "--build", str(root), str(package)]
    run(command, env={**os.environ, "SOURCE_DATE_EPOCH": str(staged.epoch)})
    return package


def debian_copyright(staged: Staged) -> str:
    """The licence of the agent and of all that is included. Every Debian has the text of Apache's."""
    own = Distribution(NAME, staged.version, "MIT", {"LICENSE": (SOURCES / "LICENSE").read_text("utf-8")})
    sections = []
    for one in (own, *staged.vendored):
        sections.append(f"--- {one.name} {one.version}: {one.license}")
        for name, text in one.texts.items():
            is_apache = "Apache License" in text[:200]
            shown = "/usr/share/common-licenses/Apache-2.0" if is_apache else text.strip()
            sections.append(f"{name}:\n\n{shown}")
    return "\n\n".join(sections) + "\n"


def _fill(template: str, values: Mapping[str, str]) -> str:
    """The template with its values; a line with an empty one is left out."""
    lines = template.splitlines(keepends=True)
    kept = [line for line in lines if all(values[name] for name in re.findall(r"@([A-Z]+)@", line))]
    return re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], "".join(kept))


def without_links(page: str, beginning: str = "") -> str:
    """The text of a page where other pages are not: links to them, if they begin so, are plain words."""
    return re.sub(rf"\[([^\]]+)\]\({re.escape(beginning)}(?!#|\w+://)[^)]*\)", r"\1", page)


# --- rpm ------------------------------------------------------------------------------------------------------


def pack_rpm(staged: Staged, output: Path) -> Path:
    """Pack the tree as an rpm; returns its path. The tree gets the format's own places and is spent."""
    root = staged.root
    machine = ARCHITECTURES[staged.architecture]
    (root / "usr/share/zsh/vendor-completions").rename(root / "usr/share/zsh/site-functions")
    copy(SOURCES / "CHANGELOG.md", root / _DOC / "CHANGELOG.md")
    for ghost in _GHOSTS:
        (root / ghost[1:]).mkdir(parents=True)
    _settle(root, staged.epoch)
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-rpm-") as directory:
        top = Path(directory)
        vendored = {word for item in staged.vendored for word in re.split(" OR | AND ", item.license)}
        bundled = [f"Provides: bundled({item.name}) = {item.version}" for item in staged.vendored if item.version]
        values = {
            "VERSION": package_version(staged.version),
            "LICENSE": " AND ".join(sorted(vendored | {"MIT"})),
            "MAINTAINER": MAINTAINER,
            "VENDOR": AUTHOR,
            "HOMEPAGE": HOMEPAGE,
            "GLIBC": staged.glibc,
            "SYSTEMD": SYSTEMD,
            "BUNDLED": "\n".join(bundled),
            "DAY": f"{datetime.fromtimestamp(staged.epoch, UTC):%a %b %d %Y}",
            "TREE": str(root),
            "FILES": str(top / "files"),
        }
        (top / "files").write_text("\n".join(_rpm_files(root)) + "\n", encoding="utf-8")
        spec = top / "package.spec"
        spec.write_text(_fill((PACKAGING / "rpm/package.spec").read_text("utf-8"), values), encoding="utf-8")
        defines = {
            "_topdir": str(top),
            "_dbpath": str(top / "database"),
            "_rpmdir": str(top / "done"),
            "_buildhost": "reproducible",
            "_binary_payload": "w6.xzdio",  # what every rpm since RHEL 6 can read
            "use_source_date_epoch_as_buildtime": "1",
            "clamp_mtime_to_source_date_epoch": "1",
            "debug_package": "%{nil}",
            "__os_install_post": "%{nil}",  # the wheels' modules stay as their hashes say
            "_build_id_links": "none",
        }
        options = [option for name, value in defines.items() for option in ("--define", f"{name} {value}")]
        run(
            ["rpmbuild", "-bb", "--quiet", "--nodeps", "--target", machine, *options, str(spec)],
            env={**os.environ, "SOURCE_DATE_EPOCH": str(staged.epoch), "LC_ALL": "C.UTF-8"},
        )
        (built,) = (top / "done").rglob("*.rpm")
        package = output / f"{NAME}-{staged.version}-1.{machine}.rpm"
        shutil.move(built, package)
    return package


def _rpm_files(root: Path) -> Iterator[str]:
    """The %files section: each path with what it is."""
    own = [f"/{HOME}", f"/etc/{NAME}", f"/usr/share/{NAME}", f"/{_DOC}", f"/usr/share/licenses/{NAME}"]
    for path in sorted(root.rglob("*")):
        name = f"/{path.relative_to(root)}"
        if name in _GHOSTS:
            yield f"%ghost %dir %attr({_GHOSTS[name]}) {name}"
            continue
        if path.is_dir():
            if any(name == place or name.startswith(f"{place}/") for place in own):
                yield f"%dir {name}"
            continue
        kinds = {"/etc/": "%config(noreplace) ", f"/{_DOC}/": "%doc ", "/usr/share/licenses/": "%license "}
        yield next((kind for place, kind in kinds.items() if name.startswith(place)), "") + name


# --- The Helm chart ---------------------------------------------------------------------------------------------


def pack_chart(output: Path, version: str | None = None) -> Path:
    """Pack the chart as an archive; returns its path. Raises BuildError for a prerelease: it has no image."""
    version = version or source_version()
    if not is_final(version):
        raise BuildError(f"the chart needs an image, which is not published of a prerelease such as {version}")
    folder = PACKAGING / "helm" / NAME
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    files |= {target: SOURCES / source for source, target in _IN_CHART.items()}
    epoch = source_epoch()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, path in sorted(files.items()):
            content = _in_chart(name, path.read_text("utf-8"), version).encode()
            entry = tarfile.TarInfo(f"{NAME}/{name}")
            entry.size, entry.mtime = len(content), epoch
            archive.addfile(entry, io.BytesIO(content))
    output.mkdir(parents=True, exist_ok=True)
    package = output / f"{NAME}-{version}.tgz"
    write(package, _gzip(packed.getvalue()))
    return package


def _in_chart(name: str, text: str, version: str) -> str:
    """A file as the chart has it: without what leads to other files of the sources."""
    source = filled_in(URLS["Source"])
    if name == "Chart.yaml":
        values = {"VERSION": version, "AUTHOR": AUTHOR, "EMAIL": EMAIL}
        return _fill(text, values | {"HOMEPAGE": HOMEPAGE, "SOURCE": source})
    if name == "README.md":
        return (
            text.replace("](../../../", f"]({source}/blob/main/") if source else without_links(text, "../../../")
        )
    return text.removeprefix("# yaml-language-server: $schema=../policy.schema.json\n#\n")


def is_final(version: str) -> bool:
    """Whether it is no prerelease."""
    return re.fullmatch(r"[\d.]+", version) is not None


# --- Processes ------------------------------------------------------------------------------------------------


def run(command: list[str], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a program to its end; returns what it wrote. Raises BuildError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed ({done.returncode}): {(done.stderr or done.stdout)[-4000:]}")
    return done.stdout


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Two builds at once do not fetch the same thing twice, nor use what is half there."""
    with (CACHE / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
