"""Log lines: their format, when failures are logged; and that the log never harms the thread that writes to it."""

import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from scheduled_events_agent.host.windows.event_log import EventLog, open_log_file
from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.telemetry.log import ChangeLogger, change, get_logger, set_up
from scheduled_events_agent.telemetry.log_ids import LogId


@pytest.fixture(autouse=True)
def _leave_no_configuration() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def told(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Lines without the time."""
    return [{key: value for key, value in line.items() if key != "time"} for line in lines(capsys)]


def run_python(program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], text=True, timeout=60, check=False, **{"capture_output": True, **options}
    )


# --- form


def test_a_changed_level_and_format_keep_the_log_destination() -> None:
    stream, entries = io.StringIO(), []
    set_up("info", "json", stream=stream, on_entry=lambda _, entry: entries.append(entry["message"]))
    get_logger().debug("before")
    change("debug", "console")
    get_logger().debug("after")
    assert "before" not in stream.getvalue()
    assert re.search(r"\[debug +\] after", stream.getvalue())
    assert entries == ["after"]


def test_an_unchanged_log_setup_is_kept() -> None:
    set_up("info", "json", stream=io.StringIO())
    before = structlog.get_config()["processors"]
    change("info", "json")
    assert structlog.get_config()["processors"] is before


def test_a_line_is_json_that_begins_with_time_level_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("info", "json")
    before = datetime.now(UTC)
    get_logger().warning("held", event_id="E-1", reason="drain failed", sentence="not here")
    (line,) = lines(capsys)
    assert list(line) == ["time", "level", "message", "event_id", "reason"]
    assert before <= datetime.fromisoformat(line.pop("time")) <= datetime.now(UTC)
    assert line == {"level": "warning", "message": "held", "event_id": "E-1", "reason": "drain failed"}


def test_bound_fields_come_after_the_message_too(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("info", "json")
    get_logger().bind(hook="drain").info("hook output", line="one")
    (line,) = lines(capsys)
    assert list(line) == ["time", "level", "message", "hook", "line"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("two\nlines", "two\nlines"),
        ("\x1b[31mred", "\x1b[31mred"),
        (datetime(2026, 5, 4, tzinfo=UTC), "2026-05-04T00:00:00Z"),
        (["a", 1], ["a", 1]),
        (ValueError("bad"), "bad"),
        ("no text: \udcff", "no text: \udcff"),
    ],
)
def test_any_value_makes_one_line(capsys: pytest.CaptureFixture[str], value: object, shown: object) -> None:
    set_up("info", "json")
    get_logger().info("seen", value=value)
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "\x1b" not in text
    assert json.loads(text)["value"] == shown


def test_a_bug_is_logged_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("info", "json")
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        get_logger().exception("a bug in the agent")
    (line,) = told(capsys)
    assert (line["level"], line["message"]) == ("error", "a bug in the agent")
    assert line["exception"].splitlines()[-1] == "RuntimeError: broken"


def test_less_severe_lines_than_the_level_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("warning", "json")
    get_logger().info("not this")
    get_logger().warning("this")
    set_up("debug", "json")  # the level may change while the agent runs
    get_logger().debug("now this")
    assert [line["message"] for line in lines(capsys)] == ["this", "now this"]


def test_console_lines_are_readable_and_have_no_colors_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up("info", "console")
    get_logger().warning("held", event_id="E-1", reason="drain failed", sentence="not here")
    text = capsys.readouterr().err
    time_, _, rest = text.partition(" ")
    assert datetime.fromisoformat(time_).tzinfo is not None
    assert rest == "[warning  ] held event_id=E-1 reason='drain failed'\n"


def test_auto_means_json_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("info", "auto")
    get_logger().info("seen")
    assert told(capsys) == [{"level": "info", "message": "seen"}]


@pytest.mark.parametrize(
    ("variables", "is_colored"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_auto_means_console_on_a_terminal_with_the_colors_of_all_other_output(
    variables: dict[str, str], *, is_colored: bool
) -> None:
    if sys.platform == "win32":
        pytest.skip("there are no such terminals on Windows")
    import os
    import pty

    master, slave = pty.openpty()
    program = """
import sys
from scheduled_events_agent.cli.terminal import Terminal
from scheduled_events_agent.telemetry.log import get_logger, set_up
print(Terminal.of(sys.stderr).paint("shown", "bold"), file=sys.stderr)
set_up("info", "auto")
get_logger().info("logged", rule="r")
"""
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"TERM": "xterm", **variables}
    run_python(program, capture_output=False, stderr=slave, env=environment)
    os.close(slave)
    text = os.read(master, 4096).decode()
    os.close(master)
    shown, logged = text.splitlines()
    assert "shown" in shown
    assert "logged" in logged
    assert "{" not in logged
    assert ["\x1b[" in line for line in (shown, logged)] == [is_colored, is_colored]


def test_debug_lines_are_all_written_however_alike(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("debug", "json")
    for _ in range(30):
        get_logger().debug("a request")
        get_logger().info("a failure")
    messages = [line["message"] for line in lines(capsys)]
    assert (messages.count("a request"), messages.count("a failure")) == (30, 20)


# --- the journal of systemd


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, io.TextIOWrapper]]:
    """A journal's socket, and a stream that is connected to the journal."""
    if sys.platform == "win32":
        pytest.skip("there is no journal on Windows")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear, (tmp_path / "stream").open("w+") as stream:
        ear.bind(str(tmp_path / "journal"))
        ear.settimeout(20)
        monkeypatch.setattr(
            "scheduled_events_agent.host.linux.service_manager._JOURNAL_SOCKET", str(tmp_path / "journal")
        )
        facts = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{facts.st_dev}:{facts.st_ino}")
        yield ear, stream


def fields_of(entry: bytes) -> dict[str, str]:
    """The format that journald reads: NAME=value, or NAME, the length in eight bytes and a value of any lines."""
    fields = {}
    while entry:
        name, _, rest = entry.partition(b"\n")
        if b"=" in name:
            name, _, value = name.partition(b"=")
        else:
            length = int.from_bytes(rest[:8], "little")
            value, rest = rest[8 : 8 + length], rest[8 + length :]
            assert rest[:1] == b"\n"
            rest = rest[1:]
        fields[name.decode()] = value.decode()
        entry = rest
    return fields


def test_the_journal_gets_fields_of_its_own(journal: tuple[socket.socket, io.TextIOWrapper]) -> None:
    ear, stream = journal
    set_up("info", "auto", stream=stream)
    get_logger().warning(
        "held",
        log_id=LogId.HELD,
        event_id="602D",
        type="Reboot",
        rule="r",
        phase="held",
        hook="a\nb",
        reason="why\nand more",
        sentence="Reboot 602D: held: why\nand more",
        attempts=2,
        rules=["one", "two"],
    )
    fields = fields_of(ear.recv(1 << 20))
    assert fields == {
        "MESSAGE": "Reboot 602D: held: why and more",
        "LOG_MESSAGE": "held",
        "REASON": "why\nand more",
        "ATTEMPTS": "2",
        "RULES": "one, two",
        "EVENT_ID": "602D",
        "EVENT_TYPE": "Reboot",
        "RULE": "r",
        "PHASE": "held",
        "HOOK": "a\nb",
        "MESSAGE_ID": LogId.HELD.message_id,
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "scheduled-events-agent",
    }
    assert Path(stream.name).read_text() == ""


def test_a_very_long_record_still_fits_into_the_journal(journal: tuple[socket.socket, io.TextIOWrapper]) -> None:
    ear, stream = journal
    set_up("info", "auto", stream=stream)
    long = "\u20ac" * 1_000_000
    texts = ("reason", "line", "exception")
    get_logger().info("seen", **dict.fromkeys(("event_id", "type", "rule", "hook", *texts, "stage", "file"), long))
    fields = fields_of(ear.recv(1 << 20))
    assert fields["LOG_MESSAGE"] == "seen"
    assert {len(fields[name.upper()]) for name in texts} == {8 * 1024}
    set_up("info", "json", stream=stream)
    get_logger().info("seen", event_id=long, type=long, rule=long, hook=long, reason=long)
    assert fields_of(ear.recv(1 << 20))["MESSAGE"].startswith('{"time"')


def test_the_journal_gets_json_if_the_policy_says_so(journal: tuple[socket.socket, io.TextIOWrapper]) -> None:
    ear, stream = journal
    set_up("info", "json", stream=stream)
    get_logger().warning("held", event_id="602D", reason="why", sentence="Reboot 602D: held: why")
    fields = fields_of(ear.recv(1 << 20))
    message = json.loads(fields.pop("MESSAGE"))
    assert [*message] == ["time", "level", "message", "event_id", "reason"]
    assert fields == {"EVENT_ID": "602D", "PRIORITY": "4", "SYSLOG_IDENTIFIER": "scheduled-events-agent"}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "it happens"),
        ({"reason": "why", "kind": "timeout", "failures": 3}, "it happens: why (kind timeout; failures 3)"),
        ({"problem": "policy.yaml:3: wrong"}, "it happens: policy.yaml:3: wrong"),
        ({"rules": ["one", "two"], "mode": "act"}, "it happens (rules one, two; mode act)"),
        ({"event_id": "602D9444-1B2C", "hook": "drain"}, "event 602D9444: it happens (hook drain)"),
        ({"event_id": "602D9444-1B2C", "type": "Reboot", "rule": "r"}, "Reboot 602D9444: it happens"),
        ({"exception": "Traceback\n  line 1\nRuntimeError: broken"}, "it happens: RuntimeError: broken"),
    ],
)
def test_a_journal_line_about_no_event_is_a_sentence_with_its_fields(
    journal: tuple[socket.socket, io.TextIOWrapper], fields: dict[str, Any], sentence: str
) -> None:
    ear, stream = journal
    set_up("info", "auto", stream=stream)
    get_logger().info("it happens", **fields)
    assert fields_of(ear.recv(1 << 20))["MESSAGE"] == sentence


def test_without_the_journals_socket_lines_go_to_the_stream(
    journal: tuple[socket.socket, io.TextIOWrapper],
) -> None:
    ear, stream = journal
    set_up("info", "auto", stream=stream)
    Path(ear.getsockname()).unlink()
    get_logger().error("lost")
    assert Path(stream.name).read_text().startswith('<3>{"time"')


def test_a_journal_that_accepts_nothing_does_not_block_logging(
    journal: tuple[socket.socket, io.TextIOWrapper],
) -> None:
    _, stream = journal
    set_up("info", "auto", stream=stream)
    for number in range(2000):  # more than a socket holds that is not read
        get_logger().info(f"seen {number}")  # one text again and again would be held back
    assert Path(stream.name).read_text().count('<6>{"time"') > 1000


# --- the stream


CHATTY = """
import sys
from scheduled_events_agent.telemetry.log import get_logger, set_up
for form in ("json", "console", "auto"):
    set_up("info", form)
    get_logger().info("seen", form=form)
print("alive")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a Unix shell")
@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_a_closed_or_full_stream_stops_no_logging(redirection: str) -> None:
    command = f'exec "$0" -c "$1" {redirection}'
    arguments = ["/bin/sh", "-c", command, sys.executable, CHATTY]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "alive\n"


def test_a_stream_closed_by_python_stops_no_logging() -> None:
    done = run_python("import sys; sys.stderr.close()\n" + CHATTY)
    assert done.stdout == "alive\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs Unix pipes")
def test_a_pipe_without_a_reader_stops_no_logging() -> None:
    import os

    reader, writer = os.pipe()
    os.close(reader)
    done = run_python(CHATTY, capture_output=False, stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    assert done.stdout == "alive\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs Unix pipes")
def test_a_full_pipe_delays_nothing_and_works_again_when_it_is_read() -> None:
    import os

    program = """
import sys, time
from scheduled_events_agent.telemetry.log import get_logger, set_up
set_up("info", "json")
began = time.monotonic()
for number in range(5000):
    get_logger().info(f"line {number}", number=number)
print(time.monotonic() - began, flush=True)
sys.stdin.readline()
get_logger().info("again")
"""
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", program], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writer
    ) as process:
        os.close(writer)
        assert process.stdin
        assert process.stdout
        seconds = float(process.stdout.readline())
        text = os.read(reader, 1 << 20).decode()
        process.stdin.write("\n")
        process.stdin.close()
        while part := os.read(reader, 1 << 20).decode():
            text += part
    os.close(reader)
    assert seconds < 60  # with a time limit for each line it would be five minutes
    messages = [json.loads(line) for line in text.splitlines()]  # every line that came is whole
    assert [message["number"] for message in messages[:-1]] == list(range(len(messages) - 1))
    assert 100 < len(messages) < 5000
    assert messages[-1]["message"] == "again"


LONG_LINES = """
import os, sys, threading
from scheduled_events_agent.telemetry.log import get_logger, set_up
set_up("info", "json")
for _ in range(15):
    os.write(2, b"." * 4095 + b"\\n")  # one page of room is left
def work(text):
    get_logger().info("hook output", line=text)
texts = [sys.argv[1] * 9000, "the engine's"]
threads = [threading.Thread(target=work, args=(text,), daemon=True) for text in texts]
for thread in threads:
    thread.start()
    thread.join(5)
print([thread.is_alive() for thread in threads], flush=True)
sys.stdin.readline()
work("after a while")
os._exit(0)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs Unix pipes")
@pytest.mark.parametrize("character", ["x", "\N{REPLACEMENT CHARACTER}", "\N{GRINNING FACE}"])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_long_line_without_enough_room_is_cut_and_delays_nothing(character: str, encoding: str) -> None:
    import os

    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", LONG_LINES, character],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=writer,
        env={**os.environ, "PYTHONIOENCODING": f"{encoding}:backslashreplace"},
    ) as process:
        os.close(writer)
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "[False, False]\n"
        data = os.read(reader, 1 << 20)
        process.stdin.write("\n")
        process.stdin.close()
        while part := os.read(reader, 1 << 20):
            data += part
    os.close(reader)
    lines = data.decode(encoding).splitlines()[15:]
    assert len(lines) == 2
    assert lines[0].endswith(character.encode(encoding, "backslashreplace").decode(encoding))
    assert json.loads(lines[1])["line"] == "after a while"


@pytest.mark.skipif(sys.platform == "win32", reason="needs Unix pipes")
def test_a_long_line_that_is_read_is_written_whole() -> None:
    text = "x\N{REPLACEMENT CHARACTER}\N{GRINNING FACE}" * 20_000
    program = """
from scheduled_events_agent.telemetry import log
from scheduled_events_agent.telemetry.log import get_logger, set_up
log._TIMEOUT_SECONDS = 60.0  # a busy reader is no failure
set_up("info", "json")
get_logger().info("long", line="x\\N{REPLACEMENT CHARACTER}\\N{GRINNING FACE}" * 20_000)
"""
    line = run_python(program).stderr
    assert json.loads(line)["line"] == text


def test_a_reload_changes_the_log_settings(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("there are no such signals on Windows")
    import signal

    policy, log = tmp_path / "policy.yaml", tmp_path / "log"
    with Simulator(vms=("vm-1",), rate_limit=None) as sim:

        def write_policy(level: str) -> None:
            settings = {
                "imds": {"endpoint": sim.endpoint(), "poll_interval": "250ms"},
                "agent": {"listen": "off", "log": {"level": level, "format": "json"}},
            }
            policy.write_text(json.dumps(settings))

        write_policy("error")
        arguments = [
            "-m",
            "scheduled_events_agent",
            "run",
            "--config",
            str(policy),
            "--state-dir",
            str(tmp_path / "state"),
        ]
        with log.open("wb") as stream:
            process = subprocess.Popen([sys.executable, *arguments], stderr=stream)
        try:
            sim.wait_polls(1)
            assert log.read_text() == ""
            write_policy("info")
            process.send_signal(signal.SIGHUP)
            sim.wait_until(lambda: "\n" in log.read_text(), "a line in the log")
        finally:
            process.terminate()
            process.wait(60)
    messages = [json.loads(line)["message"] for line in log.read_text().splitlines()]
    # The VM's name may be known before the reload or after it.
    messages = [message for message in messages if message != "this VM is known"]
    assert messages == ["the policy file was read again", "agent stopped"]


# --- failures


class Clock:
    """Monotonic seconds that pass only when the test lets them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def pass_(self, seconds: float) -> float:
        self.now += seconds
        return self.now


def test_a_repeated_failure_is_logged_once_and_then_hourly(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("info", "json")
    clock, failures = Clock(), ChangeLogger("polling")
    for _ in range(7300):
        failures.failed("refused", "connection refused", clock.pass_(1.0))
    assert told(capsys) == [
        {
            "level": "warning",
            "message": "polling fails",
            "kind": "refused",
            "reason": "connection refused",
            "failures": count,
        }
        for count in (1, 3601, 7201)
    ]


def test_a_failure_of_another_kind_is_logged_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("info", "json")
    clock, failures = Clock(), ChangeLogger("polling")
    for kind in ("refused", "refused", "timeout", "timeout"):
        failures.failed(kind, f"it was {kind}", clock.pass_(1.0))
    assert [(line["reason"], line["failures"]) for line in told(capsys)] == [
        ("it was refused", 1),
        ("it was timeout", 3),
    ]


def test_alternating_failure_kinds_are_logged_once_each_and_then_hourly(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up("info", "json")
    clock, failures = Clock(), ChangeLogger("polling")
    for _ in range(4000):
        for kind in ("server_error", "not_found"):
            failures.failed(kind, f"it was {kind}", clock.pass_(1.0))
    assert [(line["kind"], line["failures"]) for line in told(capsys)] == [
        (kind, 3600 * hour + number)
        for hour in range(3)
        for number, kind in ((1, "server_error"), (2, "not_found"))
    ]


def test_a_failure_that_comes_and_goes_is_logged_at_most_once_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, failures = Clock(), ChangeLogger("polling")
    monkeypatch.setattr("scheduled_events_agent.telemetry.log.time", SimpleNamespace(monotonic=lambda: clock.now))
    set_up("info", "json")
    for _ in range(1800):
        failures.failed("server_error", "500", clock.pass_(1.0))
        failures.succeeded(clock.pass_(1.0))
    failures.succeeded(clock.pass_(60.0))
    lines = told(capsys)
    assert 55 <= len(lines) <= 66
    assert [line["message"] for line in lines] == ["polling fails", "polling works again"] * (len(lines) // 2)
    counted = sum(line["failures"] for line in lines if line["message"] == "polling works again")
    assert counted == 1800  # failures without a line of their own are counted


# --- floods


def test_a_line_that_repeats_is_held_back_and_the_next_one_says_how_many_were(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("scheduled_events_agent.telemetry.log.time", SimpleNamespace(monotonic=lambda: clock.now))
    set_up("info", "json")
    for _ in range(86_400):
        clock.pass_(1.0)
        get_logger().info("changed", event_id="E-1", reason="x")
        get_logger().info("hook output", event_id="E-1", line="x")
    lines = told(capsys)
    of_event = [line for line in lines if line["message"] == "changed"]
    assert 1440 <= len(of_event) <= 1470
    assert len(of_event) + sum(line.get("suppressed", 0) for line in of_event) == pytest.approx(86_400, abs=60)
    assert len(lines) - len(of_event) == 86_400  # the hook's own limit is enough


def test_a_log_that_is_set_up_again_begins_no_new_burst(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("scheduled_events_agent.telemetry.log.time", SimpleNamespace(monotonic=lambda: clock.now))
    for level in ("info", "debug") * 50:  # as at each reload
        set_up("debug" if level == "debug" else "info", "json")
        for _ in range(10):
            get_logger().info("the policy file was read again")
            get_logger().warning("the policy file has a warning", problem="hooks.x: nothing uses it")
    get_logger().warning("the policy file has a warning", problem="one that is new")
    clock.pass_(60.0)
    get_logger().info("the policy file was read again")
    told_of = [line for line in told(capsys) if line["message"] == "the policy file was read again"]
    assert len(told_of) == 21
    assert told_of[-1]["suppressed"] == 980


def test_while_one_event_floods_the_log_lines_of_another_get_through(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduled_events_agent.telemetry.log.time", SimpleNamespace(monotonic=lambda: 1000.0))
    set_up("info", "json")
    for _ in range(1000):
        get_logger().info("changed", event_id="E-1")
    for message in ("changed", "preparing", "approved"):
        get_logger().info(message, event_id="E-2")
    get_logger().info("started", event_id="E-1")
    assert [(line["event_id"], line["message"]) for line in told(capsys)[20:]] == [
        ("E-2", "changed"),
        ("E-2", "preparing"),
        ("E-2", "approved"),
        ("E-1", "started"),
    ]


def test_events_without_number_do_not_flood_either(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("scheduled_events_agent.telemetry.log.time", SimpleNamespace(monotonic=lambda: clock.now))
    set_up("info", "json")
    for number in range(20_000):
        clock.pass_(1.0)
        get_logger().info("seen", event_id=f"E-{number}")
    assert 700 <= len(told(capsys)) <= 900


def test_the_same_kind_with_another_message_is_not_logged_again(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("info", "json")
    clock, failures = Clock(), ChangeLogger("polling")
    for number in range(5):
        failures.failed("server_error", f"500, request {number}", clock.pass_(1.0))
    assert [line["reason"] for line in told(capsys)] == ["500, request 0"]


def test_recovery_is_logged_with_count_and_length(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("info", "json")
    clock, failures = Clock(), ChangeLogger("polling")
    failures.failed("refused", "connection refused", clock.pass_(1.0))
    failures.failed("refused", "connection refused", clock.pass_(4.0))
    failures.succeeded(clock.pass_(5.04))
    assert told(capsys)[1:] == [
        {"level": "info", "message": "polling works again", "failures": 2, "after_seconds": 9.0}
    ]


def test_success_after_success_is_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("info", "json")
    clock, failures = Clock(), ChangeLogger("polling")
    for _ in range(3):
        failures.succeeded(clock.pass_(1.0))
    assert told(capsys) == []


def test_after_a_recovery_the_same_failure_is_logged_again(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("info", "json")
    clock, failures = Clock(), ChangeLogger("polling")
    for _ in range(2):
        failures.failed("refused", "connection refused", clock.pass_(1.0))
        failures.succeeded(clock.pass_(1.0))
    assert [(line["message"], line["failures"]) for line in told(capsys)] == [
        ("polling fails", 1),
        ("polling works again", 1),
        ("polling fails", 1),
        ("polling works again", 1),
    ]


# --- the journal of the system


def test_in_the_journal_each_line_carries_its_priority(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("the journal is systemd's")
    program = """
import os, sys
facts = os.fstat(2)
os.environ["JOURNAL_STREAM"] = f"{facts.st_dev}:{facts.st_ino + int(sys.argv[1])}"
from scheduled_events_agent.telemetry.log import get_logger, set_up
set_up("debug", "auto")
for level in ("debug", "info", "warning", "error"):
    getattr(get_logger(), level)("hello")
"""

    def priorities(offset: int) -> list[str]:
        with (tmp_path / "log").open("w+") as log:
            subprocess.run([sys.executable, "-c", program, str(offset)], stderr=log, timeout=60, check=True)
            log.seek(0)
            return [line.partition("{")[0] for line in log]

    assert priorities(0) == ["<7>", "<6>", "<4>", "<3>"]
    assert priorities(1) == [""] * 4  # another file than the journal's


# --- elsewhere than standard error


def test_lines_go_to_another_stream_and_entries_to_listeners(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    entries: list[Mapping[str, object]] = []
    ids: list[LogId | None] = []

    def take(log_id: LogId | None, entry: Mapping[str, object]) -> None:
        ids.append(log_id)
        entries.append(entry)

    set_up("info", "auto", stream=stream, on_entry=take)
    get_logger().warning("held", log_id=LogId.HELD, event_id="E-1", reason="drain failed")
    get_logger().warning("of something new")
    get_logger().debug("not this")
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == entries
    assert [list(entry.items())[1:] for entry in entries] == [
        [("level", "warning"), ("message", "held"), ("event_id", "E-1"), ("reason", "drain failed")],
        [("level", "warning"), ("message", "of something new")],
    ]
    assert ids == [LogId.HELD, LogId.OTHER_WARNING]
    assert capsys.readouterr().err == ""


def test_a_listener_gets_a_traceback_as_text_and_may_fail() -> None:
    entries: list[Mapping[str, object]] = []
    stream = io.StringIO()

    def take(_log_id: LogId | None, entry: Mapping[str, object]) -> None:
        entries.append(entry)
        raise RuntimeError("broken")

    set_up("info", "console", stream=stream, on_entry=take)
    try:
        raise ValueError("bad")
    except ValueError:
        get_logger().exception("a bug in the agent")
    assert str(entries[0]["exception"]).splitlines()[-1] == "ValueError: bad"
    assert "a bug in the agent" in stream.getvalue()


# --- the log file of a service


def texts(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in directory.iterdir()}


def test_a_line_is_in_the_file_at_once_and_goes_on_where_an_earlier_agent_ended(tmp_path: Path) -> None:
    for number in (1, 2):
        set_up("info", "auto", stream=open_log_file(tmp_path))
        get_logger().info("agent started", number=number)
        lines = (tmp_path / "agent.log").read_text().splitlines()
        assert [json.loads(line)["number"] for line in lines] == [1, 2][:number]


def test_a_full_log_file_is_rotated_and_four_older_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduled_events_agent.host.windows.event_log.MAX_LOG_BYTES", 20)
    log = open_log_file(tmp_path)
    for number in range(13):
        log.write(f"line {number:02}\n")
    log.close()
    assert texts(tmp_path) == {
        "agent.log": "line 12\n",
        **{f"agent.log.{n}": f"line {12 - 2 * n:02}\nline {13 - 2 * n:02}\n" for n in range(1, 5)},
    }


def test_a_line_written_in_parts_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduled_events_agent.host.windows.event_log.MAX_LOG_BYTES", 5000)
    set_up("info", "json", stream=open_log_file(tmp_path))
    for number in range(2):
        get_logger().info("seen", number=number, long="x" * 8000)
    files = [tmp_path / name for name in ("agent.log.1", "agent.log")]
    assert [json.loads(file.read_text())["number"] for file in files] == [0, 1]


def test_a_log_file_that_cannot_be_written_is_retried_and_stops_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "logs"
    directory.write_text("in the way")
    set_up("info", "json", stream=open_log_file(directory))
    get_logger().info("lost")
    directory.unlink()
    get_logger().info("written")
    assert json.loads((directory / "agent.log").read_text())["message"] == "written"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a device that is always full")
def test_a_full_disk_stops_no_logging(tmp_path: Path) -> None:
    (tmp_path / "agent.log").symlink_to("/dev/full")
    log = open_log_file(tmp_path)
    with pytest.raises(OSError, match="No space left on device"):
        log.write("line\n")
    set_up("info", "json", stream=log)
    get_logger().info("lost")


def test_a_missing_event_log_stops_no_logging() -> None:
    log = EventLog()
    set_up("info", "json", stream=io.StringIO(), on_entry=log.report)
    get_logger().info("seen")
    log.close()
