"""Hooks as real processes on Windows: cmd, scripts, Job objects. Runs inside a Windows Python, Wine's included."""

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from scheduled_events_agent.hooks.run import HookResult, HookRun, kill_orphans
from scheduled_events_agent.host.windows import processes as windows_process
from scheduled_events_agent.policy import Hook

if sys.platform != "win32":
    pytest.skip("Job objects and cmd are Windows'", allow_module_level=True)

import msvcrt

pytestmark = pytest.mark.wine
_ON_WINE = hasattr(ctypes.windll.ntdll, "wine_get_version")


def _run(*run: str, **options: Any) -> HookResult:
    return HookRun("test", Hook(run=run, **options), environment={}).run()


def _wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_shell_line_may_quote_paths_and_variables(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "file.txt").write_text("content\n")
    result = HookRun(
        "test", Hook(shell=f'type "{folder}\\file.txt" && echo %COLOUR%', env={"Colour": "blue"}), environment={}
    ).run()
    assert (result.outcome, result.tail.split()) == ("succeeded", ["content", "blue"])


def test_a_shell_line_gives_its_exit_code() -> None:
    result = HookRun("test", Hook(shell="exit 7"), environment={}).run()
    assert (result.outcome, result.exit_code, result.detail) == ("failed", 7, "exit code 7")


def test_a_large_exit_code_is_shown_as_windows_writes_it() -> None:
    result = _run(sys.executable, "-S", "-c", "import os; os._exit(-1073741819)")
    assert (result.exit_code, result.detail) == (3221225477, "exit code 3221225477 (0xc0000005)")


@pytest.mark.parametrize("suffix", [".cmd", ".bat"])
def test_a_batch_file_gets_its_arguments_and_gives_its_exit_code(tmp_path: Path, suffix: str) -> None:
    script = tmp_path / f"my hook{suffix}"
    script.write_text("@echo off\r\necho [%~1] [%~2] [%SCHEDULED_EVENT_ID%]\r\nexit /b 5\r\n")
    hook = Hook(run=(str(script), "a b", "c&d"))
    result = HookRun("test", hook, environment={"SCHEDULED_EVENT_ID": "A-1"}).run()
    assert (result.outcome, result.exit_code) == ("failed", 5)
    if not _ON_WINE:  # its cmd reads the & of an argument again when it echoes it
        assert result.tail == "[a b] [c&d] [A-1]\n"
    assert "[a b]" in result.tail


def test_a_batch_file_is_not_given_what_cmd_would_expand(tmp_path: Path) -> None:
    script = tmp_path / "hook.cmd"
    script.write_text("@exit /b 0\r\n")
    for argument in ("%PATH%", 'a" & calc "', "a\nb"):
        result = _run(str(script), argument)
        assert result.outcome == "not_started"
        assert result.detail.startswith("cannot pass argument 1 safely to a .cmd file: it contains ")


def test_a_program_is_found_on_the_path_with_its_suffix_left_out(tmp_path: Path) -> None:
    (tmp_path / "drain.cmd").write_text("@echo drained\r\n")
    result = _run("drain", env={"Path": f"C:\\nowhere;{tmp_path}"})
    assert (result.outcome, result.tail.strip()) == ("succeeded", "drained")


def test_the_path_of_a_program_may_use_both_kinds_of_slashes(tmp_path: Path) -> None:
    (tmp_path / "drain.cmd").write_text("@echo drained\r\n")
    assert _run((tmp_path / "drain.cmd").as_posix()).tail.strip() == "drained"


def test_a_python_script_runs_by_the_launcher_of_python(tmp_path: Path) -> None:
    script = tmp_path / "drain now.py"
    script.touch()
    (tmp_path / "py.exe").touch()
    env = {"SYSTEMROOT": str(tmp_path)}
    assert windows_process._program_command([str(script), "a b"], env) == rf'{tmp_path}\py.exe "{script}" "a b"'


def test_a_python_script_without_a_launcher_needs_its_interpreter_named(tmp_path: Path) -> None:
    script = tmp_path / "drain.py"
    script.write_text("print('drained')")
    result = _run(str(script), env={"SYSTEMROOT": str(tmp_path)})
    assert result.outcome == "not_started"
    assert f"[python.exe, {script}]" in result.detail
    assert _run(sys.executable, str(script)).tail.strip() == "drained"


def test_a_file_that_is_no_program_is_not_started(tmp_path: Path) -> None:
    file = tmp_path / "hook.exe"
    file.write_text("not a program")
    result = _run(str(file))
    assert result.outcome == "not_started"
    assert result.detail == f"neither a program nor a .cmd, .bat or .ps1 script: {file}" or _ON_WINE


def test_a_user_is_rejected() -> None:
    result = _run("cmd.exe", user="Administrator")
    assert (result.outcome, result.detail) == (
        "not_started",
        "cannot run as Administrator: on Windows a hook runs as the agent's account",
    )


def test_the_windows_hook_environment_is_the_documented_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setenv("SCHEDULED_EVENTS_AGENT_CONFIG", "x")
    code = "import os; print('\\n'.join(sorted(os.environ)))"
    hook = Hook(run=(sys.executable, "-S", "-c", code), env={"Colour": "blue"})
    names = HookRun("test", hook, environment={"SCHEDULED_EVENT_ID": "A"}).run().tail.split()
    assert {"SYSTEMROOT", "COMSPEC", "PATH", "TEMP", "COLOUR", "SCHEDULED_EVENT_ID"} <= set(names)
    assert not {"SECRET", "SCHEDULED_EVENTS_AGENT_CONFIG", "PYTHONPATH"} & set(names)


def test_output_in_the_code_page_of_the_console_is_read() -> None:
    text = "grün"
    code = "import sys; sys.stdout.buffer.write(sys.argv[1].encode('oem'))"
    assert _run(sys.executable, "-S", "-c", code, text).tail == text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "oem"])
def test_output_is_read_as_utf_8_or_in_the_code_page_of_the_console(encoding: str) -> None:
    code = f"import sys; sys.stdout.buffer.write(sys.argv[1].encode({encoding!r}))"
    lines: list[str] = []
    hook = Hook(run=(sys.executable, "-S", "-c", code, "größer\r\nkühner\r\n"))
    result = HookRun("test", hook, environment={}, on_line=lines.append).run()
    assert result.tail == "größer\nkühner\n"
    assert [line for line in lines if line] == ["größer", "kühner"]


@pytest.mark.skipif(_ON_WINE, reason="Wine's powershell.exe is a stub that answers 0 to anything")
@pytest.mark.parametrize(("ending", "expected"), [("exit 7", 7), ("", 0), ("throw 'no'", 1)])
def test_a_powershell_script_gets_its_arguments_and_gives_its_exit_code(
    tmp_path: Path, ending: str, expected: int
) -> None:
    script = tmp_path / "my hook.ps1"
    script.write_text(
        f"param($one, $two)\n'[{{0}}] [{{1}}] [{{2}}]' -f $one, $two, $env:SCHEDULED_EVENT_ID\n{ending}\n"
    )
    hook = Hook(run=(str(script), "a b", 'c"d'))
    result = HookRun("test", hook, environment={"SCHEDULED_EVENT_ID": "A-1"}).run()
    assert result.exit_code == expected
    assert result.tail.splitlines()[0] == '[a b] [c"d] [A-1]'


def test_a_hook_has_no_console_window() -> None:
    # A process without a console window has a console all the same: its programs need not make one that shows.
    code = "import ctypes; print(ctypes.windll.kernel32.GetConsoleWindow())"
    assert _run(sys.executable, "-S", "-c", code).tail == "0\n"


_TREE = """
import subprocess, sys, time
depth = int(sys.argv[1])
print('pid', __import__('os').getpid(), flush=True)
if depth:
    flags = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.DETACHED_PROCESS
    subprocess.Popen([sys.executable, '-S', '-c', sys.argv[2], str(depth - 1), sys.argv[2]],
                     creationflags=flags, stdin=subprocess.DEVNULL, stdout=sys.stdout, stderr=sys.stdout)
time.sleep(60)
"""


def test_a_hook_that_hangs_is_killed_with_its_whole_tree() -> None:
    pids: list[int] = []

    def take(line: str) -> None:
        pids.append(int(line.split()[1]))
        if len(pids) == 3:
            run.set_deadline(time.monotonic())

    run = HookRun("test", Hook(run=(sys.executable, "-S", "-c", _TREE, "2", _TREE)), environment={}, on_line=take)
    assert run.run().outcome == "timed_out"
    assert len(pids) == 3
    for pid in pids:
        _wait_until_gone(pid)


def test_the_trees_of_an_agent_end_with_it() -> None:
    code = (
        "import sys; from scheduled_events_agent.hooks.run import HookRun;"
        "from scheduled_events_agent.policy.rules import Hook;"
        "HookRun('test', Hook(run=(sys.executable, '-S', '-c', sys.argv[1], '1', sys.argv[1])), environment={},"
        "on_line=lambda line: print(line, flush=True)).run()"
    )
    agent = subprocess.Popen(
        [sys.executable, "-c", code, _TREE], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    pids = [int(agent.stdout.readline().split()[1]) for _ in range(2)]
    agent.kill()
    agent.wait()
    agent.stdout.close()
    for pid in pids:
        _wait_until_gone(pid)


_AGENT_THAT_DIES = """
import os, sys
from scheduled_events_agent.host.windows import processes as windows_process
from scheduled_events_agent.hooks.run import HookRun
from scheduled_events_agent.policy import Hook

def die(job, process):
    if sys.argv[2] == "in the job":
        windows_process.win32job.AssignProcessToJobObject(job, int(process._handle))
    print(process.pid, flush=True)
    os._exit(7)

windows_process._let_run_in = die
code = "open(__import__('sys').argv[1], 'w').close()"
HookRun(
    'test', Hook(run=(sys.executable, '-S', '-c', code, sys.argv[1])), environment={}, instance=sys.argv[1]
).run()
"""


@pytest.mark.parametrize("moment", ["in the job", "before"])
def test_a_hook_never_runs_if_its_agent_is_killed_in_the_moment_it_is_started(tmp_path: Path, moment: str) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", _AGENT_THAT_DIES, str(tmp_path / "ran"), moment],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    pid = int(agent.stdout.readline())
    assert agent.wait() == 7
    agent.stdout.close()
    if moment == "in the job":
        _wait_until_gone(pid)
    else:  # its program has not begun: the next agent ends it
        assert psutil.pid_exists(pid)
        assert kill_orphans(str(tmp_path / "other")) == 0
        assert kill_orphans(str(tmp_path / "ran")) == 1
        _wait_until_gone(pid)
    assert not (tmp_path / "ran").exists()


def test_a_hook_inherits_nothing_but_its_input_and_output(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        handle = msvcrt.get_osfhandle(file.fileno())
        os.set_handle_inheritable(handle, True)  # as a careless library may
        code = (
            "import ctypes, sys; flags, handle = ctypes.c_uint32(), ctypes.c_void_p(int(sys.argv[1]));"
            "print(ctypes.windll.kernel32.GetHandleInformation(handle, ctypes.byref(flags)))"
        )
        assert _run(sys.executable, "-S", "-c", code, str(handle)).tail == "0\n"


@pytest.mark.parametrize(
    ("options", "detail"),
    [
        ({"env": {"A": "b\0c"}}, "embedded null character"),
        ({"env": {"A=B": "c"}}, "illegal environment variable name"),
    ],
)
def test_arguments_that_cannot_be_passed_intact_prevent_the_start(options: dict[str, Any], detail: str) -> None:
    result = _run(sys.executable, **options)
    assert (result.outcome, result.detail) == ("not_started", f"cannot be started ({detail}): {sys.executable}")


@pytest.mark.parametrize(
    ("code", "expected"),
    [("import sys; print(sys.stdin.buffer.read() == b'event ' * 34_000)", "True\n"), ("pass", "")],
    ids=["reads it", "never reads"],
)
def test_a_hook_gets_a_large_event_though_no_file_can_be_made(
    monkeypatch: pytest.MonkeyPatch, code: str, expected: str
) -> None:
    monkeypatch.setenv("TEMP", r"C:\nowhere")
    monkeypatch.setattr(tempfile, "tempdir", r"C:\nowhere")
    hook = Hook(run=(sys.executable, "-S", "-c", code))
    result = HookRun("test", hook, environment={}, stdin=b"event " * 34_000).run()
    assert (result.outcome, result.tail) == ("succeeded", expected)


def test_an_argument_and_a_variable_may_hold_any_letters() -> None:
    text = "größer 日本 \U0001f600"
    code = "import os, sys; sys.stdout.buffer.write((sys.argv[1] + os.environ['TEXT']).encode())"
    assert _run(sys.executable, "-S", "-c", code, text, env={"TEXT": text}).tail == text + text


def test_hooks_leave_no_handles_open() -> None:
    process = psutil.Process()
    _run("cmd.exe", "/c", "exit")
    before = process.num_handles()
    for _ in range(10):
        _run("cmd.exe", "/c", "exit")
        _run("no-such-program")
    assert process.num_handles() <= before + 3
    assert os.environ["SYSTEMROOT"]
