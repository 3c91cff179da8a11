"""A running agent looks at its policy file: edited and not reloaded, rejected, opened to others."""

import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest

from scheduled_events_agent import host
from scheduled_events_agent.cli.config import policy_file
from scheduled_events_agent.daemon import policy_reader
from scheduled_events_agent.daemon.fallback import find_fallback
from scheduled_events_agent.daemon.inbox import PolicyFileSeen, PolicyReloaded
from scheduled_events_agent.daemon.policy_reader import PolicyReader, read_fallback, read_policy
from scheduled_events_agent.host import processes
from scheduled_events_agent.policy.load import ConfigError

GOOD = "rules: [{name: all, approve: immediately}]\n"
OTHER = "rules: [{name: other, approve: immediately}]\n"
BAD = "rules: [{name: all, approve: imediately}]\n"
EDITED = datetime(2026, 11, 28, 14, 2, 33, tzinfo=UTC)

needs_root = pytest.mark.skipif(not host.is_privileged(), reason="without privileges, it is a warning")


class Watched(NamedTuple):
    """A policy file, and the reader of an agent that looks at it."""

    path: Path
    reader: PolicyReader
    put: list[PolicyReloaded | PolicyFileSeen]

    def write(self, text: str, at: datetime = EDITED) -> None:
        self.path.write_text(text, encoding="utf-8")
        os.utime(self.path, (at.timestamp(), at.timestamp()))

    def look(self) -> list[PolicyReloaded | PolicyFileSeen]:
        """What a look puts into the inbox, and the engine's thread takes out."""
        self.reader.look()
        news = [*self.put]
        self.put.clear()
        for item in news:
            assert isinstance(item, PolicyFileSeen)
            self.reader.see(item)
        return news

    @property
    def kept(self) -> Path:
        return self.path.parent / "state" / "accepted-policy.json"


@pytest.fixture(params=["policy.yaml", pytest.param(b"\xff.yaml", id="no text")])
def watched(tmp_path: Path, request: pytest.FixtureRequest) -> Watched:
    if request.param != "policy.yaml" and os.name == "nt":
        pytest.skip("names of files are text on Windows")
    path = tmp_path / os.fsdecode(request.param)
    path.write_text(GOOD, encoding="utf-8")
    state_dir = tmp_path / "state"
    host.create_private_dir(state_dir)
    file = policy_file(path, str(state_dir))
    put: list[PolicyReloaded | PolicyFileSeen] = []
    loaded = read_policy(file, lambda *_: None, is_start=True)
    reader = PolicyReader(file, loaded, put.append, state_dir)
    reader.keep()
    return Watched(path, reader, put)


def test_a_good_file_that_was_edited_is_seen_at_the_second_look_and_rings_nothing(watched: Watched) -> None:
    assert watched.look() == []
    assert watched.look() == []
    watched.write(OTHER)
    assert watched.look() == []  # an editor may be at it
    assert watched.look() == [PolicyFileSeen(changed_at=EDITED)]
    assert watched.look() == []
    in_force = watched.reader.in_force
    assert (in_force.changed_at, in_force.rejected, in_force.next_start_failure) == (EDITED, "", "")
    watched.write(GOOD, EDITED + timedelta(hours=1))
    watched.look()
    assert watched.look() == [PolicyFileSeen()]


def test_a_file_that_changes_at_each_look_is_not_read(watched: Watched) -> None:
    for seconds in range(5):
        watched.write(BAD, EDITED + timedelta(seconds=seconds))
        assert watched.look() == []


def test_a_bad_file_that_was_edited_is_as_a_rejected_reload(watched: Watched) -> None:
    watched.write(BAD)
    watched.look()
    (seen,) = watched.look()
    assert isinstance(seen, PolicyFileSeen)
    assert f"{watched.path}:1: rules[0].approve: expected one of" in seen.error
    assert seen.next_start_failure == ""  # for it is remembered as rejected
    assert watched.reader.in_force.rejected == seen.error
    with pytest.raises(ConfigError) as rejected:
        watched.reader.file.load()
    assert find_fallback(watched.reader.file, rejected.value).loaded.content == GOOD.encode()
    # Corrected, it waits for a reload.
    watched.write(OTHER, EDITED + timedelta(minutes=1))
    watched.look()
    watched.look()
    in_force = watched.reader.in_force
    assert (in_force.rejected, in_force.rejected_at) == ("", None)
    assert in_force.changed_at == EDITED + timedelta(minutes=1)


def test_a_file_that_a_link_leads_to_is_looked_at(tmp_path: Path, watched: Watched) -> None:
    if not hasattr(os, "symlink") or os.name == "nt":
        pytest.skip("links need a privilege on Windows")
    target = tmp_path / "target.yaml"
    shutil.move(watched.path, target)
    watched.path.symlink_to(target)
    watched.look()
    watched.look()
    target.write_text(BAD, encoding="utf-8")
    watched.look()
    (seen,) = watched.look()
    assert isinstance(seen, PolicyFileSeen)
    assert "imediately" in seen.error


def test_a_file_that_is_gone_is_a_failure_of_the_next_start(watched: Watched) -> None:
    watched.path.unlink()
    watched.look()
    (seen,) = watched.look()
    assert isinstance(seen, PolicyFileSeen)
    assert "there is no such file" in seen.error
    assert seen.next_start_failure == "there is no policy file"


def test_a_file_that_can_be_read_again_is_no_longer_rejected(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.name == "nt":
        pytest.skip("a stamp has no time of a change of rights on Windows")
    with monkeypatch.context() as closed:
        closed.setattr(host, "read_small_file", permission_denied)
        watched.path.chmod(0o600)
        watched.look()
        (seen,) = watched.look()
        assert isinstance(seen, PolicyFileSeen)
        assert "Permission denied" in seen.error
    watched.path.chmod(0o644)  # neither time nor size of its content changes
    watched.look()
    assert watched.look() == [PolicyFileSeen()]


def permission_denied(path: Path, _: int) -> bytes:
    raise host.HostError(f"{path}: cannot be read: Permission denied", kind="file") from PermissionError()


@needs_root
def test_a_file_that_was_opened_to_others_is_seen_without_an_edit(watched: Watched) -> None:
    assert watched.look() == []
    assert watched.look() == []
    if os.name == "nt":
        pytest.skip("a mode opens no file on Windows")
    watched.path.chmod(0o666)
    (seen,) = watched.look()
    assert isinstance(seen, PolicyFileSeen)
    risk = f"{watched.path} can be changed by every account"
    assert risk in seen.error
    assert risk in seen.next_start_failure
    watched.path.chmod(0o644)
    assert watched.look() == [PolicyFileSeen()]


def test_a_state_directory_that_was_opened_to_others_is_seen(watched: Watched) -> None:
    if os.name == "nt":
        pytest.skip("a mode opens no directory on Windows")
    assert watched.look() == []
    watched.kept.parent.chmod(0o755)
    (seen,) = watched.look()
    assert isinstance(seen, PolicyFileSeen)
    assert (seen.error, "chmod 700" in seen.next_start_failure) == ("", True)
    watched.kept.parent.chmod(0o700)
    assert watched.look() == [PolicyFileSeen()]


def test_a_policy_that_cannot_be_kept_is_a_failure_of_the_next_start_until_it_can(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.kept.unlink()
    monkeypatch.setattr(os, "fsync", full_disk)
    watched.write(BAD)
    watched.look()
    (seen,) = watched.look()
    assert isinstance(seen, PolicyFileSeen)
    assert seen.next_start_failure.startswith("no copy of the policy in force can be written: ")
    assert not watched.kept.exists()
    monkeypatch.undo()
    (seen,) = watched.look()
    assert isinstance(seen, PolicyFileSeen)
    assert ("imediately" in seen.error, seen.next_start_failure) == (True, "")
    assert json.loads(watched.kept.read_text(encoding="utf-8"))["text"] == GOOD


def full_disk(_: int) -> None:
    raise OSError(28, "No space left on device")


def test_no_older_policy_stays_for_one_that_cannot_be_kept(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(item: PolicyReloaded | PolicyFileSeen) -> None:
        if isinstance(item, PolicyReloaded):
            reader.stop()

    file = watched.reader.file
    reader = PolicyReader(file, file.load(), put, watched.kept.parent)
    monkeypatch.setattr(os, "fsync", full_disk)
    reader.keep()
    assert json.loads(watched.kept.read_text(encoding="utf-8"))["text"] == GOOD  # it is the one in force
    watched.write(f"agent: {{mode: observe}}\n{GOOD}")
    reader.request()
    reader.run()
    assert not watched.kept.exists()
    monkeypatch.undo()
    reader.look()
    assert "mode: observe" in json.loads(watched.kept.read_text(encoding="utf-8"))["text"]


def test_an_agent_that_went_on_with_an_older_policy_looks_too(watched: Watched) -> None:
    kept = json.loads(watched.kept.read_text(encoding="utf-8"))
    watched.kept.write_text(json.dumps({**kept, "boot_id": "before"}), encoding="utf-8")
    watched.write(f"agent: {{mode: observe}}\n{BAD}")
    file = watched.reader.file
    with pytest.raises(ConfigError) as rejected:
        read_policy(file, lambda *_: None, is_start=True)
    fallback = read_fallback(file, rejected.value, lambda *_: None)
    assert fallback.loaded.settings.agent.mode == "observe"
    put: list[PolicyReloaded | PolicyFileSeen] = []
    again = Watched(
        watched.path, PolicyReader(file, fallback.loaded, put.append, watched.kept.parent, fallback), put
    )
    again.reader.keep()
    in_force = again.reader.in_force
    assert (in_force.read_at, in_force.rejected) == (fallback.accepted.accepted_at, str(rejected.value))
    assert again.look() == []
    assert again.look() == []
    # What was accepted before is in the file again: it acts only when it is loaded.
    again.write(GOOD, EDITED + timedelta(minutes=1))
    again.look()
    assert again.look() == [PolicyFileSeen(changed_at=EDITED + timedelta(minutes=1))]


def test_the_file_is_looked_at_once_a_minute(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    assert policy_reader.LOOK_SECONDS == 60.0
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            watched.reader.stop()

    monkeypatch.setattr(policy_reader, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watched.reader, "look", look)
    watched.reader.run()
    assert len(looks) == 3


def test_a_disk_that_fails_at_a_look_does_not_end_the_thread(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: list[int] = []

    def fail() -> None:
        looks.append(1)
        if len(looks) == 2:
            watched.reader.stop()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(policy_reader, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watched.reader, "look", fail)
    watched.reader.run()
    assert "Input/output error" in "".join(capsys.readouterr())


def test_the_built_in_policy_keeps_none_and_removes_the_one_from_before(watched: Watched) -> None:
    file = policy_file(None, str(watched.kept.parent))
    reader = PolicyReader(file, file.load(), watched.put.append, watched.kept.parent)
    assert watched.kept.exists()
    reader.keep()
    assert not watched.kept.exists()
    reader.look()
    assert watched.put == []


@pytest.mark.parametrize(
    ("place", "option", "reason"),
    [
        ("cleared", "", "is in a directory that the system clears, as at a boot"),
        ("memory", "", "is in memory (tmpfs), and gone after it"),
        ("temporary", "", "is on Azure's temporary disk /mnt, which may be empty after it"),
        ("cleared", "--state-dir", ""),
        ("", "", ""),
    ],
)
def test_a_state_that_a_boot_takes_away_is_seen_at_once_unless_it_is_for_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, option: str, reason: str
) -> None:
    state_dir = tmp_path / "state"
    host.create_private_dir(state_dir)
    monkeypatch.setattr(host, "cleared_places", lambda: (tmp_path,) if place == "cleared" else ())
    monkeypatch.setattr(processes, "temporary_disk", lambda _: Path("/mnt") if place == "temporary" else None)
    kind = "tmpfs" if place == "memory" else "ext4"
    monkeypatch.setattr(processes, "file_system", lambda _: (kind, Path("/")))
    path = tmp_path / "policy.yaml"
    path.write_text(f"agent: {{state_dir: '{state_dir}'}}\n{GOOD}", encoding="utf-8")
    file = policy_file(path, str(state_dir) if option else None)
    put: list[PolicyReloaded | PolicyFileSeen] = []
    reader = PolicyReader(file, file.load(), put.append, state_dir)
    reader.keep()
    reader.look()
    expected = [PolicyFileSeen(next_start_failure=f"the state directory {state_dir} {reason}")] if reason else []
    assert put == expected
