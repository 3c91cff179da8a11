"""A release, built from a clone: what is in dist/, what is refused, and that two machines give the same bytes."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("releases are made on Linux", allow_module_level=True)

import apt
from container import Container
from sources import clone, git

from scheduled_events_agent import __version__

CHECKOUT = Path(__file__).resolve().parents[2]
NAME = "scheduled-events-agent"
IMAGE = "images.agent.example.com/scheduled-events-agent"
BASE = f"scheduled_events_agent-{__version__}"
PACKAGES = (
    *(f"{NAME}_{__version__}-1_{machine}.deb" for machine in ("amd64", "arm64")),
    *(f"{NAME}-{__version__}-1.{machine}.rpm" for machine in ("x86_64", "aarch64")),
)
pytest_plugins = ["machines"]
pytestmark = pytest.mark.timeout(900)


def release(sources: Path, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(sources / "packaging/release.py"), *words]
    without_python = {name: value for name, value in os.environ.items() if name != "PYTHON_EMBED"}
    return subprocess.run(
        command, env=without_python | environment, capture_output=True, text=True, check=False, timeout=600
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clone(tmp_path_factory.mktemp("clone") / "sources")


@pytest.fixture(scope="module")
def dist(sources: Path) -> Path:
    """The release as a draft, in a folder where something lay before."""
    apt.need("rpmbuild", "rpm")
    (sources / "dist").mkdir()
    (sources / "dist/left").touch()
    done = release(sources, "build", "--draft")
    assert done.returncode == 0, done.stderr
    assert "no MSI: PYTHON_EMBED=FILE is not given" in done.stdout
    return sources / "dist"


def test_a_release_has_all_files_and_their_sums(dist: Path) -> None:
    expected = [f"{BASE}.tar.gz", f"{BASE}-py3-none-any.whl", f"{NAME}-{__version__}.tgz"]
    expected += [*PACKAGES, *(f"{one}.cdx.json" for one in PACKAGES)]
    assert sorted(path.name for path in dist.iterdir()) == sorted([*expected, "SHA256SUMS"])
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=dist, check=True)
    named = [line.split("  ")[1] for line in (dist / "SHA256SUMS").read_text().splitlines()]
    assert named == sorted(expected)


def test_the_sdist_has_the_sources_and_builds_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    with tarfile.open(dist / f"{BASE}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    assert {
        "SECURITY.md",
        "LICENSE",
        "CHANGELOG.md",
        "pyproject.toml",
        "tests/system/test_release_files.py",
    } <= names
    assert {name.partition("/")[0] for name in names} & {".github", ".ci", ".cache", ".venv", "dist"} == set()
    with zipfile.ZipFile(dist / f"{BASE}-py3-none-any.whl") as wheel:
        modules = {name for name in wheel.namelist() if name.startswith("scheduled_events_agent/")}
    package = tmp_path / BASE / "agent"
    files = (path for path in (package / "scheduled_events_agent").rglob("*") if path.is_file())
    assert modules == {path.relative_to(package).as_posix() for path in files}


def test_the_packages_say_how_to_report_a_vulnerability(dist: Path) -> None:
    for package, command in ((PACKAGES[0], ("dpkg-deb", "--contents")), (PACKAGES[2], ("rpm", "-qpl"))):
        listed = subprocess.run([*command, str(dist / package)], capture_output=True, text=True, check=True).stdout
        assert f"/usr/share/doc/{NAME}/SECURITY.md" in listed, package


def test_a_bill_of_materials_names_every_wheel_of_the_package_with_its_hash(dist: Path) -> None:
    pinned = (CHECKOUT / "packaging/requirements.txt").read_text()
    for package in PACKAGES:
        bill = json.loads((dist / f"{package}.cdx.json").read_text())
        itself = bill["metadata"]["component"]
        assert (itself["name"], itself["version"]) == (NAME, __version__)
        assert itself["hashes"][0]["content"] == hashlib.sha256((dist / package).read_bytes()).hexdigest()
        found = {component["name"]: component for component in bill["components"]}
        assert {"httpx", "PyYAML", "structlog", "prometheus_client", "psutil", "msgspec", "libyaml"} <= set(found)
        for name, component in found.items():
            assert component["licenses"][0]["expression"], name
            if name != "libyaml":  # which is a part of PyYAML's wheels
                assert component["hashes"][0]["content"] in pinned, name
                assert component["purl"].startswith("pkg:pypi/"), name


def test_a_bill_of_materials_is_valid_cyclonedx(dist: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv/bin/python")
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "cyclonedx-python-lib[json-validation]"], check=True, timeout=300)
    code = (
        "import sys; from cyclonedx.validation.json import JsonStrictValidator as Validator\n"
        "from cyclonedx.schema import SchemaVersion\n"
        "sys.exit(Validator(SchemaVersion.V1_6).validate_str(sys.stdin.read()) and 'it is not valid')"
    )
    text = (dist / f"{PACKAGES[0]}.cdx.json").read_text()
    assert subprocess.run([python, "-c", code], input=text, text=True, check=False).returncode == 0
    broken = text.replace('"type": "library"', '"type": "book"')
    assert subprocess.run([python, "-c", code], input=broken, text=True, check=False).returncode == 1


def test_a_package_of_the_release_is_tried_as_the_workflow_does(dist: Path, debian: Path) -> None:
    with Container(debian) as machine:
        machine.copy_in(dist, "/root/dist")
        said = machine.run("/opt/project/packaging/try.sh", "/root/dist", timeout=400).stdout
        assert "approved   Reboot" in said
        assert said.endswith("packaging/try.sh: as expected\n")


# --- refusals


@pytest.fixture
def tidy(sources: Path) -> Iterator[Path]:
    """The clone, and its files as they were afterwards."""
    yield sources
    git(sources, "reset", "--quiet", "--hard")
    git(sources, "clean", "--quiet", "--force")


@pytest.mark.parametrize("name", ["README.md", "new.txt"])
def test_a_change_that_is_not_committed_is_refused_in_a_draft_too(tidy: Path, name: str) -> None:
    with (tidy / name).open("a") as file:
        file.write("changed\n")
    done = release(tidy, "build", "--draft")
    assert done.returncode == 1
    assert "a release is built from a commit: commit these changes or take them away\n" in done.stderr
    assert done.stderr.endswith(f" {name}\n")


def test_a_commit_without_the_tag_of_its_version_is_refused(tidy: Path) -> None:
    refusal = f"packaging/release.py: HEAD: expected the tag v{__version__}, found"
    assert release(tidy, "build").stderr.startswith(f"{refusal} none (DRAFT=1: a try, without one)")
    git(tidy, "tag", "v0.0.1")
    assert release(tidy, "build").stderr.startswith(f"{refusal} v0.0.1 (")
    git(tidy, "tag", "--delete", "v0.0.1")


def test_a_tagged_commit_is_refused_until_everything_is_filled_in(tidy: Path) -> None:
    before = git(tidy, "rev-parse", "HEAD").strip()
    page = "docs/verify.md"
    (tidy / page).write_text(f"https://{NAME}.invalid/\n")
    git(tidy, "commit", "--quiet", "--all", "--message=With an address that is not filled in")
    git(tidy, "tag", f"v{__version__}")
    done = release(tidy, "build")
    checked = release(tidy, "check", f"v{__version__}")
    git(tidy, "tag", "--delete", f"v{__version__}")
    git(tidy, "reset", "--quiet", "--hard", before)
    assert (done.returncode, checked.returncode, checked.stderr) == (1, 1, done.stderr)
    assert f"{page}: it names an address that ends in .invalid: fill in the real one\n" in done.stderr


def test_a_version_is_set_in_the_sources_and_in_the_changelog(tidy: Path) -> None:
    changelog = (tidy / "CHANGELOG.md").read_text()
    (tidy / "CHANGELOG.md").write_text(
        changelog.replace("## [Unreleased]\n", "## [Unreleased]\n\n### Added\n\n- A.\n", 1)
    )
    done = release(tidy, "version", "9.8.7")
    assert (done.returncode, done.stderr) == (0, "")
    assert '__version__ = "9.8.7"' in (tidy / "agent/scheduled_events_agent/__init__.py").read_text()
    notes = release(tidy, "notes", "v9.8.7").stdout
    assert notes.startswith("### ")
    assert not any("version" in line for line in release(tidy, "check", "9.8.7").stderr.splitlines())
    assert release(tidy, "version", "nonsense").returncode == 1


def publish_check(sources: Path, output: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """What release.yml runs first, for a tag."""
    settings = {"IMAGE": IMAGE, "GITHUB_OUTPUT": str(output), **environment}
    command = [str(sources / "packaging/publish.sh"), "check"]
    return subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, check=False, timeout=60
    )


def test_a_tag_is_published_once_an_owner_has_filled_everything_in(tidy: Path, tmp_path: Path) -> None:
    """What the page of packaging asks of an owner, done with made-up addresses."""
    before = git(tidy, "rev-parse", "HEAD").strip()
    output = tmp_path / "output"
    for name in git(tidy, "grep", "--files-with-matches", r"\.invalid").split():
        if name.startswith(("tests/", "packaging/release.py")):
            continue
        text = (tidy / name).read_text()
        (tidy / name).write_text(text.replace("scheduled-events-agent.invalid", "agent.example.com"))
    containerfile = tidy / "packaging/container/Containerfile"
    base = f"\\g<0>@sha256:{hashlib.sha256().hexdigest()}"
    containerfile.write_text(re.sub(r"^ARG BASE=.*", base, containerfile.read_text(), flags=re.MULTILINE))
    assert release(tidy, "version", "9.8.7").returncode == 0
    git(tidy, "commit", "--quiet", "--all", "--message=Release 9.8.7")

    unpushed = publish_check(tidy, output, VERSION="v9.8.7")
    assert (unpushed.returncode, unpushed.stderr) == (1, "publish.sh: v9.8.7 is not on main\n")
    git(tidy, "update-ref", "refs/remotes/origin/main", "HEAD")
    elsewhere = publish_check(tidy, output, VERSION="v9.8.7", IMAGE="images.example.com/other")
    assert elsewhere.stderr.endswith("values.yaml to be images.example.com/other\n")
    other = publish_check(tidy, output, VERSION="v9.8.8")
    assert (other.returncode, "expected version 9.8.8, found 9.8.7\n" in other.stderr) == (1, True)
    assert not output.exists()
    ready = publish_check(tidy, output, VERSION="v9.8.7")
    assert (ready.returncode, ready.stderr, output.read_text()) == (0, "", "prerelease=false\n")

    changelog = tidy / "CHANGELOG.md"
    changelog.write_text(
        changelog.read_text().replace("## [Unreleased]", "## [Unreleased]\n\n### Fixed\n\n- A.", 1)
    )
    assert release(tidy, "version", "9.8.8rc1").returncode == 0
    git(tidy, "commit", "--quiet", "--all", "--message=Release 9.8.8rc1")
    git(tidy, "update-ref", "refs/remotes/origin/main", "HEAD")
    candidate = publish_check(tidy, output, VERSION="v9.8.8rc1")
    assert (candidate.returncode, candidate.stderr) == (0, "")
    assert output.read_text() == "prerelease=false\nprerelease=true\n"
    git(tidy, "reset", "--quiet", "--hard", before)


# --- the same bytes


@pytest.mark.nightly
def test_two_clones_in_two_places_give_the_same_sums(dist: Path, sources: Path, tmp_path: Path) -> None:
    """Place, umask, time zone and hour differ."""
    other = tmp_path / "somewhere" / "else"
    other.parent.mkdir()
    before = os.umask(0o077)
    try:
        git(sources, "clone", "--quiet", str(sources), str(other))
        (other / ".cache").mkdir()
        (other / ".cache/packaging").symlink_to(CHECKOUT / ".cache/packaging")
        done = release(other, "build", "--draft", TZ="Asia/Tokyo")
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    assert release(sources, "compare", str(dist), str(other / "dist")).stderr == ""
    assert (other / "dist/SHA256SUMS").read_text() == (dist / "SHA256SUMS").read_text()
