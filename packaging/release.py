"""Makes a release: the checks before it, the files of it, and its text. Publishing is release.yml's.

    packaging/release.py version 0.2.0    sets the version, and the changelog's heading and links
    packaging/release.py check v0.2.0     whether version, changelog, addresses and image are ready for it
    packaging/release.py notes v0.2.0     the changelog's section for it
    packaging/release.py build            all files of it into dist/, which is emptied first ("make release")
    packaging/release.py image            the image, from the wheel that it puts into dist/ ("make image")
    packaging/release.py compare A B      whether two folders with releases have the same SHA256SUMS

Invariant: with the same tools (Python, dpkg, rpm, wixl) ``build`` makes the same bytes of a commit, whatever the
place, the hour, the umask or the time zone.
"""  # noqa: INP001 - a script

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

if sys.platform == "win32":
    raise ImportError("releases are made on Linux")

sys.path.insert(0, str(Path(__file__).resolve().parent / "windows"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import msi
from build import (
    ARCHITECTURES,
    CACHE,
    HOMEPAGE,
    NAME,
    PROJECT,
    SOURCES,
    URLS,
    BuildError,
    build,
    build_python,
    check_version,
    edit,
    filled_in,
    is_final,
    is_placeholder,
    pack_chart,
    run,
    source_version,
)

CHANGELOG = SOURCES / "CHANGELOG.md"
CONTAINERFILE = "packaging/container/Containerfile"
SUMS = "SHA256SUMS"
_UNRELEASED = "## [Unreleased]"
_BUILDERS = ("podman", "docker")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="packaging/release.py", description="Makes a release.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, purpose in (
        ("version", "set the version, and the changelog's heading and links"),
        ("check", "say what is not ready for a release of this version"),
        ("notes", "print the changelog's section for this version"),
    ):
        commands.add_parser(name, help=purpose).add_argument("version", help="such as 0.2.0 or v0.2.0")
    whole = commands.add_parser("build", help="write all files of the release into dist/")
    whole.add_argument("--draft", action="store_true", help="a try: no tag, and what is not filled in may stay so")
    commands.add_parser("image", help="build the wheel and the image")
    both = commands.add_parser("compare", help="compare the SHA256SUMS of two folders")
    both.add_argument("folders", nargs=2, type=Path)
    options = parser.parse_args(arguments)
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        match options.command:
            case "version":
                set_version(options.version.removeprefix("v"), datetime.now(UTC))
            case "check":
                refuse(check(options.version.removeprefix("v")))
            case "notes":
                print(notes(CHANGELOG.read_text("utf-8"), options.version.removeprefix("v")))
            case "build":
                build_release(SOURCES / "dist", is_draft=options.draft)
            case "image":
                build_image()
            case "compare":
                refuse(differences(*((folder / SUMS).read_text("utf-8") for folder in options.folders)))
    except BuildError as error:
        print(f"packaging/release.py: {error}", file=sys.stderr)
        return 1
    return 0


def refuse(problems: Iterable[str]) -> None:
    """Raise BuildError with all problems, if there are any."""
    if found := list(problems):
        raise BuildError("\n".join(found))


# --- Before a release -----------------------------------------------------------------------------------------


def check(version: str) -> Iterator[str]:
    """What keeps this version from being released, a sentence each."""
    if version != source_version():
        yield f"agent/scheduled_events_agent/__init__.py: expected version {version}, found {source_version()}"
    try:
        notes(CHANGELOG.read_text("utf-8"), version)
    except BuildError as error:
        yield str(error)
    yield from placeholders({"authors": PROJECT["authors"][0]["email"], **URLS}, published_texts())


def published_texts() -> dict[str, str]:
    """The files that may name an address of the project, by name: pages, packaging, config, the agent."""
    listed = run(["git", "-C", str(SOURCES), "ls-files", "*.md", "packaging", "config", "agent"]).split()
    return {name: (SOURCES / name).read_text("utf-8") for name in listed if not name.endswith("/release.py")}


def placeholders(addresses: Mapping[str, str], files: Mapping[str, str]) -> Iterator[str]:
    """What an owner has to fill in before the first release: addresses, and the digest of the image's base.

    ``addresses``: of pyproject.toml, by key. ``files``: other files by name, the Containerfile among them.
    """
    for key, address in addresses.items():
        if is_placeholder(address):
            yield f"pyproject.toml: {key} is {address}: fill in a real address"
    for name, text in files.items():
        if re.search(rf"{NAME}\.invalid\b", text):
            yield f"{name}: it names an address that ends in .invalid: fill in the real one"
    (base,) = re.findall(r"^ARG BASE=(\S+)$", files[CONTAINERFILE], re.MULTILINE)
    if "@sha256:" not in base:
        yield f"{CONTAINERFILE}: BASE is {base}: add its digest (@sha256:...), so that it is the same each time"


def notes(changelog: str, version: str) -> str:
    """The text of the version's section. Raises BuildError if it is not the newest one, or has no date."""
    headings = re.findall(r"^## .*$", changelog, re.MULTILINE)
    released = [heading for heading in headings if heading != _UNRELEASED]
    newest = released[0] if released else "none"
    if not re.fullmatch(rf"## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", newest):
        raise BuildError(
            f"CHANGELOG.md: expected the newest heading to be '## [{version}] - DATE', found {newest!r}; "
            f"packaging/release.py version {version} writes it"
        )
    after = changelog.split(f"{newest}\n", 1)[1]
    section = re.split(r"^(?:## |\[[^\]]+\]: )", after, maxsplit=1, flags=re.MULTILINE)[0].strip()
    if not section:
        raise BuildError(f"CHANGELOG.md: expected what has changed under {newest!r}, found nothing")
    return section


def set_version(version: str, now: datetime) -> None:
    """Write the version into the sources: what was unreleased becomes its section."""
    check_version(version)
    text = with_version(CHANGELOG.read_text("utf-8"), version, f"{now:%Y-%m-%d}", URLS["Source"])
    CHANGELOG.write_text(text, encoding="utf-8")
    package = SOURCES / "agent/scheduled_events_agent/__init__.py"
    edit(package, f'__version__ = "{source_version()}"', f'__version__ = "{version}"')


def with_version(changelog: str, version: str, date: str, source: str) -> str:
    """The changelog with a section for the version, of what was unreleased. Raises BuildError."""
    if f"## [{version}]" in changelog:
        raise BuildError(f"CHANGELOG.md: it has a section for {version} already; expected another version")
    if _UNRELEASED not in changelog:
        raise BuildError(f"CHANGELOG.md: expected the heading {_UNRELEASED!r}, found none")
    earlier = re.findall(r"^## \[(\d[^\]]*)\]", changelog, re.MULTILINE)
    what = f"compare/v{earlier[0]}...v{version}" if earlier else f"tree/v{version}"
    links = f"[Unreleased]: {source}/compare/v{version}...HEAD\n[{version}]: {source}/{what}"
    changelog = changelog.replace(_UNRELEASED, f"{_UNRELEASED}\n\n## [{version}] - {date}")
    return re.sub(r"^\[Unreleased\]: .*$", links, changelog, flags=re.MULTILINE)


# --- The files ------------------------------------------------------------------------------------------------


def build_release(output: Path, *, is_draft: bool) -> None:
    """Write sdist, wheel, deb, rpm, chart, MSI, what each package contains, and SHA256SUMS.

    ``output`` is emptied first. Raises BuildError for uncommitted changes; unless it is a draft, also if HEAD has
    not the version's tag, or something is not filled in.
    """
    git = ["git", "-C", str(SOURCES)]
    if changes := run([*git, "status", "--porcelain"]).rstrip():
        raise BuildError(f"a release is built from a commit: commit these changes or take them away\n{changes}")
    os.environ["SOURCE_DATE_EPOCH"] = run([*git, "log", "-1", "--format=%ct"]).strip()
    version = source_version()
    if not is_draft:
        tags = run([*git, "tag", "--points-at", "HEAD"]).split()
        if f"v{version}" not in tags:
            found = ", ".join(tags) or "none"
            raise BuildError(f"HEAD: expected the tag v{version}, found {found} (DRAFT=1: a try, without one)")
        refuse(check(version))
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="release-", dir=output.parent) as directory:
        fresh = Path(directory)
        for path in _build_all(fresh):
            print(path.name, flush=True)
        write_sums(fresh)
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(fresh, output)
        output.chmod(0o755)  # the temporary folder is private
    print(f"{SUMS}: {output}")


def _build_all(output: Path) -> Iterator[Path]:
    yield from build_python(output)
    for what in ("deb", "rpm"):
        for architecture in ARCHITECTURES:
            yield build(what, architecture, None, output)
    if is_final(source_version()):
        yield pack_chart(output)
    else:
        print("no chart: it needs an image, which is not published of a prerelease")
    python_embed = os.environ.get("PYTHON_EMBED", "")
    if not is_final(source_version()):
        print("no MSI: Windows Installer has no version such as that of a prerelease")
    elif python_embed:
        yield msi.build(Path(python_embed), None, None, output)
    else:
        print("no MSI: PYTHON_EMBED=FILE is not given (packaging/windows/python.toml says which file)")


def write_sums(folder: Path) -> None:
    """Write the SHA-256 of every file of the folder, sorted by name, as ``sha256sum -c`` reads it."""
    files = sorted(path for path in folder.iterdir() if path.name != SUMS)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def differences(one: str, other: str) -> Iterator[str]:
    """Lines of SHA256SUMS that are in one of the two only."""
    first, second = one.splitlines(), other.splitlines()
    for line in sorted({*first} ^ {*second}):
        place = "first" if line in first else "second"
        yield f"{SUMS}: only the {place} has {line}"


def build_image() -> None:
    """Build the image with podman or docker: tags NAME:VERSION and NAME:latest, labels from pyproject.toml."""
    builder = next((name for name in _BUILDERS if shutil.which(name)), "")
    if not builder:
        raise BuildError("an image is built with podman or docker, and neither is here; install one of them")
    dist = SOURCES / "dist"
    for old in dist.glob("*.whl"):
        old.unlink()
    build_python(dist)
    labels = {
        "title": NAME,
        "version": source_version(),
        "licenses": PROJECT["license"],
        "url": HOMEPAGE,
        "source": filled_in(URLS["Source"]),
    }
    options = [f"--label=org.opencontainers.image.{name}={value}" for name, value in labels.items() if value]
    tags = [f"--tag={NAME}:{tag}" for tag in (source_version(), "latest")]
    base = [f"--build-arg=BASE={os.environ['BASE']}"] if "BASE" in os.environ else []
    # The other format has no place for HEALTHCHECK. (docker has this one by default.)
    image_format = ["--format=docker"] if builder == "podman" else []
    command = [
        builder,
        "build",
        *image_format,
        *options,
        *tags,
        *base,
        f"--file={SOURCES / CONTAINERFILE}",
        str(SOURCES),
    ]
    if subprocess.run(command, check=False).returncode != 0:
        raise BuildError(f"{' '.join(command)} failed; what it wrote is above")


if __name__ == "__main__":
    sys.exit(main())
