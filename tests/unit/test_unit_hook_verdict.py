"""How a run of a unit is judged, and how a unit is told about an event; those in system/ ask systemd itself."""

import shlex
import subprocess
import sys
from typing import Any

import pytest

if sys.platform == "win32":
    pytest.skip("units are Linux's", allow_module_level=True)

from agent.host.linux.units import environment_file, verdict

_BEFORE, _OWN = b"b" * 16, b"o" * 16
_STOPPED = "stopped by another program or an operator before it was done"
_UNKNOWN = "how it ended is not known: systemd could not be asked in time"


def end(**properties: Any) -> dict[str, Any]:
    """The properties of a service that was started at 100, and whose process ended with 0 at 200."""
    return {
        "InvocationID": _OWN,
        "ConditionTimestamp": 99,
        "ConditionResult": True,
        "AssertResult": True,
        "Result": "success",
        "ExecMainCode": 1,
        "ExecMainStatus": 0,
        "InactiveExitTimestampMonotonic": 100,
        "ActiveExitTimestampMonotonic": 201,
        "ExecMainExitTimestampMonotonic": 200,
        **properties,
    }


def judged(properties: dict[str, Any], job: str | None = "done", *others: str) -> tuple[int | None, str | None]:
    """The verdict, with the result of the job that was asked for and those of others."""
    return verdict(properties, _BEFORE, job, *others)


def test_a_run_that_systemd_calls_a_success_is_one() -> None:
    assert judged(end()) == (0, None)


def test_an_invocation_from_before_does_not_count() -> None:
    assert judged(end(InvocationID=_BEFORE)) == (None, "it did not run")
    assert judged(end(InvocationID=b"")) == (None, "it did not run")


@pytest.mark.parametrize("result", ["timeout", "collected", "once", "frozen", "skipped", "invalid", "unsupported"])
def test_a_job_that_was_not_done_is_no_success(result: str) -> None:
    phrase = f"systemd did not start it: the result of the job is {result}"
    assert judged(end(), result) == (None, phrase)


def test_a_canceled_job_is_no_success_whosever_it_was() -> None:
    assert judged(end(), "canceled", "done") == (None, _STOPPED)
    assert judged(end(), "done", "canceled") == (None, _STOPPED)


def test_a_service_that_was_told_to_stop_before_its_process_ended_was_stopped() -> None:
    stopped = end(ActiveExitTimestampMonotonic=199)
    assert judged(stopped, "done", "done") == (None, _STOPPED)
    assert judged(stopped, "done") == (None, _STOPPED)  # the job that stopped it may not have been seen
    started_again = end(ActiveExitTimestampMonotonic=99)  # that was the run before
    assert judged(started_again, "done", "done") == (0, None)


def test_what_was_not_seen_is_not_taken_for_a_success() -> None:
    assert judged(end(), None) == (None, _UNKNOWN)
    assert judged(end(), None, "done") == (None, _UNKNOWN)
    forgotten = end(InvocationID=b"", ConditionTimestamp=0, ConditionResult=False, AssertResult=False)
    assert judged(forgotten, "done") == (None, _UNKNOWN)


def test_a_signal_is_no_success_even_where_systemd_takes_it_for_one() -> None:
    assert judged(end(ExecMainCode=2, ExecMainStatus=15)) == (-15, None)
    assert judged(end(ExecMainCode=3, ExecMainStatus=11, Result="core-dump")) == (-11, None)


def test_a_service_without_a_main_process_cannot_be_judged() -> None:
    phrase = "it has no main process by which to tell whether it was done (Type=, PIDFile=)"
    assert judged(end(ExecMainCode=0)) == (None, phrase)


def test_no_verdict_but_a_success_has_the_exit_code_0() -> None:
    flags = (True, False)
    for result in ("success", "exit-code", "signal", "timeout", "exec-condition", "unheard-of"):
        for code, status in ((0, 0), (1, 0), (1, 3), (2, 15)):
            for own in (None, "done", "failed", "canceled", "dependency"):
                for condition, is_new in ((a, b) for a in flags for b in flags):
                    facts = end(Result=result, ExecMainCode=code, ExecMainStatus=status, ConditionResult=condition)
                    facts["InvocationID"] = _OWN if is_new else _BEFORE
                    exit_code, _ = judged(facts, own)
                    has_run = condition and is_new and code == 1
                    is_good = result == "success" and own in ("done", "failed") and has_run
                    assert (exit_code == 0) == is_good, (facts, own, exit_code)


def test_the_environment_file_says_the_same_to_a_shell() -> None:
    texts = {"A": '"\'`$(exit 1)${B}$B \\ \\\\\\" \\n\n\n#x\n;y\\\n\\', "B": "", "C": " \t ", "D": "\u20ac"}
    script = f'{environment_file(texts)}\nprintf \'%s\\0\' "$A" "$B" "$C" "$D"'
    done = subprocess.run(["/bin/sh", "-euc", script], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == list(texts.values())


def test_each_variable_is_one_assignment_in_double_quotes() -> None:
    assert environment_file({"A": 'x"y', "B": "a\nb"}) == 'A="x\\"y"\nB="a\nb"\n'
    assert shlex.split(environment_file({"A": 'x"y\nC=d'})) == ['A=x"y\nC=d']


def test_what_neither_systemd_nor_a_process_can_take_is_replaced() -> None:
    controls = "".join(map(chr, (*range(32), 127)))
    assert environment_file({"A": controls}) == f'A="{" " * 9}\t\n{" " * 22}"\n'
    no_characters = ["\ufdd0", "\ufdef", "\ufffe", "\uffff", "\U0001fffe", "\U0010ffff", "\ud800", "\udfff"]
    assert environment_file({"A": "".join(no_characters)}) == f'A="{chr(0xFFFD) * 8}"\n'
    kept = "\ufdcf\ufdf0\ufffd\U00010000\U0010fffd\ue000\ud7ff\x80\u2028"
    assert environment_file({"A": kept}) == f'A="{kept}"\n'
