"""A log entry as the Event Log shows it, and the log file beside it."""

from pathlib import Path

import pytest

from scheduled_events_agent.host.windows import event_log
from scheduled_events_agent.host.windows.event_log import open_log_file, text_of


def test_a_text_is_the_message_its_reason_and_a_line_for_each_field() -> None:
    entry = {
        "time": "2026-05-04T12:00:00Z",
        "level": "warning",
        "message": "hook finished",
        "event_id": "E-1",
        "hook": "drain",
        "stage": "prepare",
        "reason": "exit code 7",
        "rules": ["one", "two"],
        "rule": None,
    }
    assert text_of(entry) == (
        "hook finished: exit code 7\r\n\r\nevent_id: E-1\r\nhook: drain\r\nstage: prepare\r\nrules: one, two"
    )


def test_a_text_begins_with_the_sentence_of_an_entry_that_has_one() -> None:
    entry = {
        "message": "held",
        "sentence": "Reboot 602D9444: held: why",
        "reason": "held: why",
        "event_id": "602D",
    }
    assert text_of(entry) == "Reboot 602D9444: held: why\r\n\r\nevent_id: 602D"


def test_hook_output_is_never_part_of_a_text() -> None:
    for more in ({}, {"sentence": "Reboot 602D9444: hook drain: password: x"}):
        assert text_of({"message": "of something new", "line": "password: x", **more}) == "of something new"


@pytest.mark.parametrize(
    ("text", "shown"),
    [("fe80::1%12", "fe80::1% 12"), ("%%1797", "% % 1797"), ("100%", "100%"), ("a\0b", "a b"), ("\udcff", "?")],
)
def test_the_viewer_finds_nothing_in_a_text_to_put_something_else_for(text: str, shown: str) -> None:
    assert text_of({"message": text}) == shown


@pytest.mark.parametrize("letter", ["x", "\n", "\U0001f600", "%1"])
def test_a_text_is_cut_to_the_limit_of_the_event_log(letter: str) -> None:
    # Which counts as UTF-16 does, and what it is really given.
    assert len(text_of({"message": letter * 100_000}).encode("utf-16-le")) == 2 * 30_000
    assert len(text_of({"message": "x" + letter * 100_000}).encode("utf-16-le")) // 2 in (29_999, 30_000)


def test_older_log_files_are_kept_while_a_reader_prevents_the_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "MAX_LOG_BYTES", 100)
    monkeypatch.setattr(event_log, "find_log_dir_risk", lambda _: None)
    for number in range(1, 5):
        (tmp_path / f"agent.log.{number}").write_text(f"{number}\n")
    is_read = True
    replace = Path.replace

    def replace_unless_read(path: Path, target: Path) -> Path:
        if is_read and path.name == "agent.log":
            raise PermissionError("another process uses the file")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replace_unless_read)
    log = open_log_file(tmp_path)
    log.write("x" * 100 + "\n")
    for _ in range(5):
        log.write("a line\n")
    is_read = False
    log.write("the last line\n")
    log.close()
    found = {path.name: path.read_text().splitlines()[0] for path in tmp_path.iterdir()}
    older = {"agent.log.2": "1", "agent.log.3": "2", "agent.log.4": "3"}
    assert found == {"agent.log": "the last line", "agent.log.1": "x" * 100, **older}
