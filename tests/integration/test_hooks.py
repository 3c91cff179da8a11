"""Hooks as real processes: what holds on every system. The programs are Python's own."""

import gc
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from scheduled_events_agent.hooks.run import HookQueue, HookQueues, HookResult, HookRun
from scheduled_events_agent.policy import Hook


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Whatever a test does to a hook: no thread, child process or descriptor of ours outlives it."""
    _run("pass")  # what is loaded or made at the first hook stays
    gc.collect()  # what other tests have left is closed now, not meanwhile
    assert _watchers() == []
    before = threading.active_count(), _count_descriptors(), _children()
    yield
    assert _watchers() == []
    assert (threading.active_count(), _count_descriptors()) == before[:2]
    assert _children() <= before[2]  # other files may have some: those of a fixture for all tests


def _watchers() -> list[threading.Thread]:
    """The threads that wait for a hook's end and have not ended: they do so just after its result is there."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("hook-")]
    for thread in threads:
        thread.join(60.0)
    return [thread for thread in threads if thread.is_alive()]


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _count_descriptors() -> int:
    if sys.platform == "win32":
        return 0  # handles come and go with the interpreter; test_hooks_windows.py counts them over many runs
    return psutil.Process().num_fds()


def _python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code, *arguments)


def _hook(code: str, *arguments: str, **options: Any) -> Hook:
    return Hook(run=_python(code, *arguments), **options)


def _run(code: str, *arguments: str, **options: Any) -> HookResult:
    result = HookRun("test", _hook(code, *arguments, **options), environment={}).run()
    print(result)  # for a test that fails: why
    return result


class _Background:
    """A run on a thread of its own, and the lines it wrote."""

    def __init__(self, hook: Hook, **options: Any) -> None:
        self.lines: list[str] = []
        self.result: HookResult | None = None
        self._first_line = threading.Event()
        self.run = HookRun("test", hook, on_line=self._take, **{"environment": {}, **options})
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _take(self, line: str) -> None:
        self.lines.append(line)
        self._first_line.set()

    def _run(self) -> None:
        self.result = self.run.run()

    def wait_for_line(self) -> None:
        assert self._first_line.wait(200.0)  # Wine may take long to start a process

    def finish(self) -> HookResult:
        self._thread.join(60.0)
        assert self.result is not None
        return self.result


_READY_AND_SLEEP = "import time; print('ready', flush=True); time.sleep(60)"


def test_exit_code_0_is_success_and_any_other_is_not() -> None:
    good, bad = _run("pass"), _run("raise SystemExit(3)")
    assert (good.outcome, good.exit_code, good.attempts, good.detail) == ("succeeded", 0, 1, "exit code 0")
    assert (bad.outcome, bad.exit_code, bad.attempts, bad.detail) == ("failed", 3, 1, "exit code 3")


def test_arguments_arrive_as_they_were_written() -> None:
    arguments = ["", "a b", "$HOME %PATH%", 'say "hi"', "back\\slash\\", "*", "ä€", "a&b|c>d"]
    result = _run("import sys; print(ascii(sys.argv[1:]))", *arguments)
    assert result.tail == f"{arguments!a}\n"


def test_a_shell_line_goes_through_the_shell() -> None:
    result = HookRun("test", Hook(shell="echo one&& echo two&& exit 4"), environment={}).run()
    assert (result.outcome, result.exit_code, result.tail) == ("failed", 4, "one\ntwo\n")


def test_the_event_arrives_on_standard_input() -> None:
    code = "import sys; data = sys.stdin.buffer.read(); print(len(data), data[:7])"
    for data in (b"", b'{"a":1}', b"x" * 3_000_000):
        result = HookRun("test", _hook(code), environment={}, stdin=data).run()
        expected = ("succeeded", "exit code 0", f"{len(data)} {data[:7]!r}\n")
        assert (result.outcome, result.detail, result.tail) == expected


def test_a_hook_that_does_not_read_its_input_is_not_held_up() -> None:
    assert HookRun("test", _hook("pass"), environment={}, stdin=b"x" * 3_000_000).run().outcome == "succeeded"


def test_every_attempt_gets_the_whole_input() -> None:
    code = "import sys; print(sys.stdin.read()); raise SystemExit(1)"
    lines: list[str] = []
    hook = _hook(code, attempts=2, retry_delay=0.01)
    HookRun("test", hook, environment={}, stdin=b"whole", on_line=lines.append).run()
    assert lines == ["whole", "whole"]


_TELLS_SECONDS_LEFT = "import os; print(os.environ['SCHEDULED_EVENT_SECONDS_LEFT']); raise SystemExit(1)"


def test_each_attempt_gets_the_seconds_that_are_left_then() -> None:
    lines: list[str] = []
    hook = _hook(_TELLS_SECONDS_LEFT, attempts=2, retry_delay=3.0)
    HookRun("test", hook, environment={"SCHEDULED_EVENT_SECONDS_LEFT": "1000"}, on_line=lines.append).run()
    assert int(lines[0]) - int(lines[1]) >= 3


def test_a_run_that_waited_its_turn_gets_the_seconds_that_are_left_then() -> None:
    queues = HookQueues(HookQueue)
    first = _Background(_hook(_READY_AND_SLEEP, serialize=True), queues=queues)
    first.wait_for_line()
    deadline = time.monotonic() + 1000.0
    second = _Background(
        _hook(_TELLS_SECONDS_LEFT, serialize=True),
        queues=queues,
        environment={"SCHEDULED_EVENT_SECONDS_LEFT": "1000"},
        deadline=deadline,
    )
    second.run.set_deadline(deadline - 800.0)  # NotBefore has moved
    time.sleep(2.0)
    first.run.cancel()
    first.finish()
    second.finish()
    assert int(second.lines[0]) <= 198


def test_variables_of_the_event_of_the_policy_and_of_the_system_arrive() -> None:
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    hook = _hook(code, env={"COLOUR": "blue", "SCHEDULED_EVENT_ID": "not this"})
    result = HookRun("test", hook, environment={"SCHEDULED_EVENT_ID": "A", "SCHEDULED_EVENT_TYPE": "Fr ä"}).run()
    seen = json.loads(result.tail)
    assert (seen["COLOUR"], seen["SCHEDULED_EVENT_ID"], seen["SCHEDULED_EVENT_TYPE"]) == ("blue", "A", "Fr ä")
    assert "PATH" in seen


@pytest.mark.parametrize(
    ("timeout", "deadline_seconds", "least", "most"),
    [
        (90.0, None, 90, 90),
        (90.0, 3600.0, 90, 90),
        (3600.0, 100.0, 60, 95),  # 5 s of the 100 are for its processes to end in
    ],
)
def test_each_attempt_gets_the_seconds_until_it_is_ended(
    timeout: float, deadline_seconds: float | None, least: int, most: int
) -> None:
    code = "import os; print(os.environ['SCHEDULED_EVENT_TIMEOUT_SECONDS'], flush=True); raise SystemExit(1)"
    lines: list[str] = []
    hook = _hook(code, timeout=timeout, attempts=2, retry_delay=1.5)
    deadline = None if deadline_seconds is None else time.monotonic() + deadline_seconds
    HookRun("test", hook, environment={}, deadline=deadline, on_line=lines.append).run()
    given = [int(line) for line in lines]
    assert all(least <= seconds <= most for seconds in given)
    assert len(given) == 2
    if deadline_seconds == 100.0:
        assert given[1] < given[0]  # the second attempt has less time than the first


def test_output_and_errors_are_passed_on_line_by_line_while_the_hook_runs() -> None:
    code = (
        "import sys, time; print('ready', flush=True); print('error', file=sys.stderr, flush=True); time.sleep(60)"
    )
    background = _Background(_hook(code))
    background.wait_for_line()
    background.run.cancel()
    assert background.finish().outcome == "canceled"
    assert background.lines[0] == "ready"
    assert set(background.lines) <= {"ready", "error"}


def test_random_bytes_delay_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", lambda size: b"\n" * size)  # of such bytes is what ends the output
    background = _Background(_hook(_READY_AND_SLEEP))
    background.wait_for_line()
    background.run.cancel()
    assert background.finish().outcome == "canceled"


def test_a_last_line_without_an_end_is_passed_on_too() -> None:
    lines: list[str] = []
    code = "import sys; sys.stdout.write('one\\ntwo')"
    result = HookRun("test", _hook(code), environment={}, on_line=lines.append).run()
    assert (lines, result.tail) == (["one", "two"], "one\ntwo")


def test_a_long_line_is_cut_and_its_end_is_kept_with_the_result() -> None:
    lines: list[str] = []
    code = "import sys; sys.stdout.write('x' * 1_000_000 + 'end\\nnext\\n')"
    result = HookRun("test", _hook(code), environment={}, on_line=lines.append).run()
    assert lines == ["x" * 2000 + " (cut)", "next"]
    assert result.tail.endswith("xend\nnext\n")
    assert len(result.tail.encode()) <= 4096


def test_of_many_lines_the_first_thousand_are_passed_on_and_a_note() -> None:
    lines: list[str] = []
    code = "print('\\n'.join(map(str, range(5000))))"
    result = HookRun("test", _hook(code), environment={}, on_line=lines.append).run()
    assert lines[:1000] == [str(number) for number in range(1000)]
    assert lines[1000:] == ["(more than 1000 lines: of the rest, only the end is kept with the result)"]
    assert result.tail.endswith("4998\n4999\n")


def test_terminal_control_characters_are_removed() -> None:
    lines: list[str] = []
    code = r"import sys; sys.stdout.buffer.write(b'\x1b[31mred\x1b[0m\ta\x07b\x00c\r\nnext\n')"
    result = HookRun("test", _hook(code), environment={}, on_line=lines.append).run()
    assert lines == ["red\ta b c", "next"]
    assert result.tail == "red\ta b c\nnext\n"


def test_a_listener_that_fails_does_not_stop_the_hook() -> None:
    def fail(line: str) -> None:
        raise OSError(line)

    code = "print('x' * 300_000)"
    assert HookRun("test", _hook(code), environment={}, on_line=fail).run().outcome == "succeeded"


def test_a_hook_that_hangs_is_killed_at_its_time_limit() -> None:
    begun = time.monotonic()
    result = _run("import time; time.sleep(60)", timeout=0.5)
    assert (result.outcome, result.attempts) == ("timed_out", 1)
    assert re.fullmatch("killed after [0-9.]+m?s; its time limit is 500ms", result.detail)
    assert 0.5 <= result.duration_seconds <= time.monotonic() - begun < 60


def test_a_hook_that_hangs_is_gone_before_the_deadline() -> None:
    deadline = time.monotonic() + 1
    result = HookRun("test", _hook("import time; time.sleep(600)"), environment={}, deadline=deadline).run()
    assert result.outcome == "timed_out"
    assert result.detail.endswith(", no time was left")
    assert time.monotonic() < deadline + 60


def test_with_its_deadline_past_a_hook_is_not_started() -> None:
    result = HookRun("test", _hook("pass"), environment={}, deadline=time.monotonic() - 1).run()
    assert (result.outcome, result.attempts, result.detail) == ("not_started", 0, "no time was left")


def test_a_deadline_that_moves_nearer_ends_the_hook_sooner() -> None:
    background = _Background(_hook(_READY_AND_SLEEP), deadline=time.monotonic() + 60)
    background.wait_for_line()
    background.run.set_deadline(time.monotonic() + 0.2)
    assert background.finish().outcome == "timed_out"


def test_a_deadline_that_moves_away_lets_the_hook_finish(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; print('ready', flush=True);"
        "[time.sleep(0.02) for _ in iter(lambda: os.path.exists(sys.argv[1]), True)]"
    )
    background = _Background(_hook(code, str(tmp_path / "go")), deadline=time.monotonic() + 60)
    background.wait_for_line()
    deadline = time.monotonic() + 2
    background.run.set_deadline(deadline)
    background.run.set_deadline(None)
    time.sleep(deadline + 0.5 - time.monotonic())
    (tmp_path / "go").touch()
    assert background.finish().outcome == "succeeded"


def test_a_failed_attempt_is_followed_by_another_until_one_succeeds(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; p = pathlib.Path(sys.argv[1]); n = len(p.read_text()) if p.exists() else 0;"
        "p.write_text('x' * (n + 1)); print('attempt', n + 1); raise SystemExit(0 if n == 2 else 1)"
    )
    lines: list[str] = []
    hook = _hook(code, str(tmp_path / "count"), attempts=5, retry_delay=0.05)
    result = HookRun("test", hook, environment={}, on_line=lines.append).run()
    assert (result.outcome, result.attempts, result.tail) == ("succeeded", 3, "attempt 3\n")
    assert lines == ["attempt 1", "attempt 2", "attempt 3"]
    assert result.duration_seconds > 0.1


def test_the_last_attempt_decides() -> None:
    result = _run("raise SystemExit(7)", attempts=3, retry_delay=0.01)
    assert (result.outcome, result.exit_code, result.attempts) == ("failed", 7, 3)


def test_a_time_limit_holds_for_each_attempt() -> None:
    result = _run("import time; time.sleep(60)", timeout=0.3, attempts=2, retry_delay=0.01)
    assert (result.outcome, result.attempts) == ("timed_out", 2)
    assert result.duration_seconds > 0.6


def test_no_attempt_is_made_that_could_not_begin_in_time() -> None:
    hook = _hook("raise SystemExit(1)", attempts=3, retry_delay=600.0)
    result = HookRun("test", hook, environment={}, deadline=time.monotonic() + 60).run()
    assert (result.outcome, result.attempts) == ("failed", 1)
    assert result.detail == "exit code 1; no time was left to try again"
    assert result.duration_seconds < 45


def test_a_running_hook_can_be_canceled() -> None:
    background = _Background(_hook(_READY_AND_SLEEP, attempts=3))
    background.wait_for_line()
    background.run.cancel()
    result = background.finish()
    assert (result.outcome, result.attempts) == ("canceled", 1)
    assert result.detail.startswith("canceled after ")
    assert result.tail == "ready\n"


def test_a_hook_can_be_canceled_between_attempts() -> None:
    background = _Background(_hook("print('ready'); raise SystemExit(1)", attempts=3, retry_delay=60.0))
    background.wait_for_line()
    while not background.run._has_ended:  # canceled sooner, the attempt had no exit code
        time.sleep(0.01)
    background.run.cancel()
    result = background.finish()
    assert (result.outcome, result.attempts) == ("canceled", 1)
    assert result.detail == "canceled before attempt 2; exit code 1"


def test_a_hook_that_was_canceled_before_it_ran_is_not_started() -> None:
    run = HookRun("test", _hook("pass"), environment={})
    run.cancel()
    result = run.run()
    assert (result.outcome, result.attempts, result.detail) == ("canceled", 0, "canceled before it started")


def test_a_serialized_hook_waits_for_its_other_run(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; name = sys.argv[1]; handle = os.open(name, os.O_CREAT | os.O_EXCL);"
        "print('in', flush=True); time.sleep(0.1); os.close(handle); os.unlink(name)"
    )
    queues = HookQueues(HookQueue)
    hook = _hook(code, str(tmp_path / "inside"), serialize=True)
    runs = [_Background(hook, queues=queues) for _ in range(4)]
    assert [run.finish().outcome for run in runs] == ["succeeded"] * 4


@pytest.mark.parametrize(
    ("kinds", "expected"), [((2, 2, 2, 2), "0123"), ((2, 3, 2, 0), "0321"), ((2, 2, 1, 0), "0321")]
)
def test_serialized_runs_are_ordered_by_rank_and_then_by_arrival(
    tmp_path: Path, kinds: tuple[int, ...], expected: str
) -> None:
    order, go = tmp_path / "order", tmp_path / "go"
    code = (
        "import os, sys, time; open(sys.argv[1], 'a').write(os.environ['NUMBER']);"
        "[time.sleep(0.02) for _ in iter(lambda: os.path.exists(sys.argv[2]), True)]"
    )
    hook, queues = _hook(code, str(order), str(go), serialize=True), HookQueues(HookQueue)
    runs = []
    for number, kind in enumerate(kinds):
        rank = (kind, 0.0, 0.0)
        run = _Background(hook, queues=queues, environment={"NUMBER": str(number)}, rank=rank)
        runs.append(run)
        while len(queues["test"]._waiting) < number or not (number or order.exists()):
            time.sleep(0.01)
        assert run.run.is_queued is bool(number)
    go.touch()
    assert [run.finish().outcome for run in runs] == ["succeeded"] * 4
    assert order.read_text(encoding="utf-8") == expected


def test_the_limit_of_a_run_has_all_its_attempts_and_what_cuts_it() -> None:
    hook = _hook(_READY_AND_SLEEP, timeout=120.0, attempts=2, retry_delay=3.0, serialize=True)
    queues = HookQueues(HookQueue)
    begun = time.monotonic()
    background = _Background(hook, queues=queues)
    background.wait_for_line()
    run = background.run
    assert run.limit_seconds == 243.0
    run.set_deadline(begun + 60.0)  # NotBefore has come nearer
    assert 0.0 < run.limit_seconds <= 60.0
    run.set_deadline(None)
    assert run.limit_seconds == 243.0
    run.cancel(is_urgent=True)  # an eviction needs this VM: at most a second is left
    ended_by = run.limit_seconds
    assert 1.0 <= ended_by <= time.monotonic() - begun + 1.001
    run.cancel()
    assert run.limit_seconds == ended_by
    assert background.finish().outcome == "canceled"


def test_a_hook_that_is_not_serialized_runs_for_two_events_at_once() -> None:
    both = [_Background(_hook(_READY_AND_SLEEP)) for _ in range(2)]
    for background in both:
        background.wait_for_line()
    for background in both:
        background.run.cancel()
    assert [background.finish().outcome for background in both] == ["canceled", "canceled"]


def test_a_queued_hook_can_be_canceled_or_time_out() -> None:
    hook, queues = _hook(_READY_AND_SLEEP, serialize=True), HookQueues(HookQueue)
    first = _Background(hook, queues=queues)
    first.wait_for_line()
    second = _Background(hook, queues=queues)
    third = _Background(hook, queues=queues, deadline=time.monotonic() + 0.2)
    late = third.finish()
    assert (late.outcome, late.attempts, late.has_run) == ("not_started", 0, False)
    assert late.detail == "no time was left after other runs of this hook"
    second.run.cancel()
    canceled = second.finish()
    assert (canceled.outcome, canceled.attempts, canceled.has_run) == ("canceled", 0, False)
    first.run.cancel()
    ended = first.finish()
    assert (ended.outcome, ended.has_run) == ("canceled", True)


def test_a_program_that_is_missing_or_a_directory_is_not_started(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for program, detail in (
        (str(missing), f"no such file: {missing}"),
        (str(tmp_path), f"a directory, not a program: {tmp_path}"),
    ):
        result = HookRun("test", Hook(run=(program,)), environment={}).run()
        assert (result.outcome, result.exit_code, result.detail) == ("not_started", None, detail)
    unknown = HookRun("test", Hook(run=("no-such-program",)), environment={}).run()
    assert unknown.outcome == "not_started"
    assert unknown.detail.startswith("no such program on the PATH ")
    assert unknown.detail.endswith(": no-such-program")


def test_a_hook_runs_in_the_root_directory_or_its_configured_one(tmp_path: Path) -> None:
    code = "import os; print(os.getcwd())"
    assert _run(code).tail.strip() == ("C:\\" if sys.platform == "win32" else "/")
    assert Path(_run(code, cwd=str(tmp_path)).tail.strip()) == tmp_path
    result = _run(code, cwd=str(tmp_path / "missing"))
    assert (result.outcome, result.detail) == (
        "not_started",
        f"no such directory to run in: {tmp_path / 'missing'}",
    )


def test_an_invalid_hook_value_does_not_raise() -> None:
    for hook in (
        Hook(run=()),
        Hook(shell=""),
        Hook(run=("a\0b",)),
        _hook("pass", env={"A": "x\0y"}),
        _hook("pass", env={"A=B": "x"}),
        _hook("pass", user="a\0b"),
        _hook("pass", cwd="a\0b"),
        Hook(shell="a\0b"),
    ):
        result = HookRun("test", hook, environment={}).run()
        assert result.outcome in ("not_started", "succeeded"), hook


def test_child_processes_end_with_their_hook() -> None:
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'],"
        "stdin=subprocess.DEVNULL); print(p.pid)"
    )
    result = _run(code)
    assert result.outcome == "succeeded"
    assert not psutil.pid_exists(int(result.tail))


def test_hooks_of_different_events_run_side_by_side() -> None:
    runs = [_Background(_hook(f"print({number}); raise SystemExit({number})")) for number in range(8)]
    assert [run.finish().exit_code for run in runs] == list(range(8))
    assert [run.lines for run in runs] == [[str(number)] for number in range(8)]
