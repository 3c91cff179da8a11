"""What is checked before a release, and the version that it gets. (Its files: system/test_release_files.py.)"""

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from scheduled_events_agent import RUNBOOK_URL

if sys.platform == "win32":
    pytest.skip("releases are made on Linux", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = """\
# Changelog

## [Unreleased]

### Fixed

- A bug.

## [0.1.0] - 2026-01-02

### Added

- Everything.

[Unreleased]: https://example.com/compare/v0.1.0...HEAD
[0.1.0]: https://example.com/tree/v0.1.0
"""


@pytest.fixture(scope="module")
def release() -> ModuleType:
    """packaging/release.py, imported."""
    spec = importlib.util.spec_from_file_location("packaging_release", ROOT / "packaging/release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_new_version_gets_what_was_unreleased_and_links(release: ModuleType) -> None:
    text = release.with_version(CHANGELOG, "0.2.0", "2026-02-03", "https://example.com")
    assert "## [Unreleased]\n\n## [0.2.0] - 2026-02-03\n\n### Fixed\n" in text
    assert text.endswith(
        "[Unreleased]: https://example.com/compare/v0.2.0...HEAD\n"
        "[0.2.0]: https://example.com/compare/v0.1.0...v0.2.0\n"
        "[0.1.0]: https://example.com/tree/v0.1.0\n"
    )
    assert release.notes(text, "0.2.0") == "### Fixed\n\n- A bug."


def test_the_changelog_is_ready_for_its_first_version(release: ModuleType) -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    if "## [0.1.0]" not in text:
        text = release.with_version(text, "0.1.0", "2026-01-02", "https://example.com")
    first = release.notes(text[text.index("## [0.1.0]") :], "0.1.0")
    assert first.startswith("### Added\n")
    assert len(first.splitlines()) <= 40  # one screen


def test_the_notes_of_the_last_version_end_before_the_links(release: ModuleType) -> None:
    text = CHANGELOG.replace("## [Unreleased]\n\n### Fixed\n\n- A bug.\n\n", "## [Unreleased]\n\n")
    assert release.notes(text, "0.1.0") == "### Added\n\n- Everything."


@pytest.mark.parametrize(
    ("old", "new", "refusal"),
    [
        ("## [0.1.0] - 2026-01-02", "## [0.1.0] - unreleased", "'## [0.1.0] - unreleased'; packaging/release.py"),
        ("## [0.1.0] - 2026-01-02", "## 0.1.0 (unreleased)", "'## 0.1.0 (unreleased)'; packaging/release.py"),
        ("## [0.1.0]", "## [0.0.9]", "expected the newest heading to be '## [0.1.0] - DATE', found '## [0.0.9]"),
        (
            "### Added\n\n- Everything.\n",
            "",
            "expected what has changed under '## [0.1.0] - 2026-01-02', found nothing",
        ),
    ],
)
def test_a_changelog_that_is_not_ready_is_refused(release: ModuleType, old: str, new: str, refusal: str) -> None:
    assert old in CHANGELOG
    with pytest.raises(release.BuildError) as caught:
        release.notes(CHANGELOG.replace(old, new), "0.1.0")
    assert refusal in str(caught.value)


def test_a_version_that_has_a_section_is_refused(release: ModuleType) -> None:
    with pytest.raises(release.BuildError) as caught:
        release.with_version(CHANGELOG, "0.1.0", "2026-02-03", "https://example.com")
    assert str(caught.value) == "CHANGELOG.md: it has a section for 0.1.0 already; expected another version"


def test_another_version_than_that_of_the_sources_is_refused(release: ModuleType) -> None:
    first = next(release.check("99.0.0"))
    assert first.startswith("agent/scheduled_events_agent/__init__.py: expected version 99.0.0, found ")


def test_addresses_and_a_base_that_are_not_filled_in_are_refused(release: ModuleType) -> None:
    addresses = {
        "authors": "us@example.invalid",
        "Source": "https://a.example.invalid/b",
        "Issues": "https://a.example",
    }
    files = {
        "docs/page.md": "see https://packages.scheduled-events-agent.invalid/apt",
        "docs/other.md": "see https://example.com and nowhere.invalid",
        release.CONTAINERFILE: "ARG BASE=python:3.13-slim\n",
    }
    so_that = "so that it is the same each time"
    assert list(release.placeholders(addresses, files)) == [
        "pyproject.toml: authors is us@example.invalid: fill in a real address",
        "pyproject.toml: Source is https://a.example.invalid/b: fill in a real address",
        "docs/page.md: it names an address that ends in .invalid: fill in the real one",
        f"{release.CONTAINERFILE}: BASE is python:3.13-slim: add its digest (@sha256:...), {so_that}",
    ]
    filled = {release.CONTAINERFILE: "ARG BASE=python:3.13-slim@sha256:0123\n"}
    assert list(release.placeholders({"Homepage": "https://example.com/"}, filled)) == []


def test_every_file_with_the_address_of_the_runbook_is_looked_at(release: ModuleType) -> None:
    """While that is not filled in, ``check`` so names each of them."""
    named = {name for name, text in release.published_texts().items() if RUNBOOK_URL in text}
    assert named == {
        "agent/scheduled_events_agent/__init__.py",
        "config/prometheus/README.md",
        "config/prometheus/rules.test.yaml",
        "config/prometheus/rules.yaml",
    }


@pytest.mark.usefixtures("release")
@pytest.mark.parametrize(
    ("version", "packaged"), [("0.2.0", "0.2.0"), ("0.2.0rc1", "0.2.0~rc1"), ("0.2.0b2", "0.2.0~b2")]
)
def test_a_prerelease_comes_before_its_release(version: str, packaged: str) -> None:
    assert sys.modules["build"].package_version(version) == packaged


def test_two_builds_that_differ_are_named(release: ModuleType) -> None:
    same, one, other = "a  same\n", "b  file\n", "c  file\n"
    assert list(release.differences(same + one, same + one)) == []
    assert list(release.differences(same + one, same + other)) == [
        "SHA256SUMS: only the first has b  file",
        "SHA256SUMS: only the second has c  file",
    ]


def test_security_md_has_the_addresses_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    assert project["authors"][0]["email"] in text
    assert f"]({project['urls']['Security']})" in text
    assert set(project["urls"]) >= {"Homepage", "Source", "Issues", "Changelog", "Security", "Runbook"}
