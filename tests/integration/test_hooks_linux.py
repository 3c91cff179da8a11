"""Hooks as real processes on Linux: the ones that try to get away, and what they inherit."""

import gc
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from msgspec.structs import replace

from scheduled_events_agent.daemon.executor import ThreadExecutor
from scheduled_events_agent.engine import RunOnClear
from scheduled_events_agent.hooks import run as hooks
from scheduled_events_agent.hooks.run import HookResult, HookRun, kill_orphans
from scheduled_events_agent.policy import Hook
from scheduled_events_agent.policy.settings import Settings

if sys.platform == "win32":
    pytest.skip("process groups and sessions are Linux's", allow_module_level=True)

from scheduled_events_agent.host.linux import processes as linux

_IS_ROOT = os.geteuid() == 0
_INSTANCE = f"test-{os.getpid()}"


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hooks, "_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(hooks, "_LEFTOVER_GRACE_SECONDS", 0.3)
    process = psutil.Process()
    _shell("true")
    gc.collect()  # what other tests have left is closed now, not meanwhile
    threads, descriptors, children = threading.active_count(), process.num_fds(), _children()
    yield
    assert threading.active_count() == threads
    assert process.num_fds() == descriptors
    assert _left_over(_children() - children) == []
    assert linux.find_leftovers(_INSTANCE) == set()
    assert linux._trees == {}


def _shell(text: str, **options: Any) -> HookResult:
    return HookRun("test", Hook(shell=text, **options), environment={}, instance=_INSTANCE).run()


def _children(*, recursive: bool = True) -> set[int]:
    """This process's own. Other files may have some: those that serve all tests."""
    return {child.pid for child in psutil.Process().children(recursive=recursive)}


def _left_over(pids: Iterable[int]) -> list[str]:
    """Which of them are still there, although zombies are reaped as in each cycle of the agent; none may run."""
    deadline = time.monotonic() + 60.0
    while (left := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < deadline:
        assert all(_has_ended(pid) for pid in left), [_describe(pid) for pid in left]
        linux.reap_zombies()
        time.sleep(0.01)
    return [_describe(pid) for pid in left]


def _describe(pid: int) -> str:
    """The process's command, state and session, for a message: this process releases none of its own."""
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline()) or process.name()
        session = "the session of the test" if os.getsid(pid) == os.getsid(0) else "another session"
        return f"{pid} {command}, {process.status()}, in {session}"
    except (psutil.Error, OSError):
        return f"{pid}, gone by now"


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _pids(folder: Path) -> list[int]:
    """The processes that noted themselves in the folder."""
    return [int(path.name) for path in folder.iterdir()]


def test_a_hook_is_asked_to_end_before_it_is_killed() -> None:
    result = _shell("trap 'echo bye; exit 0' TERM; while :; do sleep 0.01; done", timeout=3.0)
    assert (result.outcome, result.exit_code) == ("timed_out", 0)
    assert result.tail.endswith("bye\n")


def test_a_hook_that_ignores_the_request_is_killed() -> None:
    result = _shell("trap '' TERM; while :; do sleep 0.01; done", timeout=3.0)
    assert (result.outcome, result.exit_code) == ("timed_out", -signal.SIGKILL)
    assert result.duration_seconds > 3.1
    found = re.fullmatch(r"killed after ([\d.]+)s; its time limit is 3s", result.detail)
    assert found
    assert float(found[1]) > 3.1  # with the time after SIGTERM


def test_the_grace_ends_with_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_GRACE_SECONDS", 30.0)
    hook = Hook(shell="trap '' TERM; while :; do sleep 0.01; done")
    deadline = time.monotonic() + 3.0
    result = HookRun("test", hook, environment={}, deadline=deadline).run()
    assert (result.outcome, result.exit_code) == ("timed_out", -signal.SIGKILL)
    assert deadline - 0.05 < time.monotonic() < deadline + 20.0


def test_a_stopped_hook_is_ended_too() -> None:
    assert _shell("kill -STOP $$", timeout=0.2).outcome == "timed_out"


def test_a_hook_that_dies_of_a_signal_has_failed() -> None:
    result = _shell("kill -SEGV $$")
    assert (result.outcome, result.exit_code, result.detail) == ("failed", -11, "ended by SIGSEGV")


_ESCAPES = {
    "in the background": "sleep 60 &",
    "own session": "setsid sleep 60 &",
    "own session, no parent": "setsid -f sleep 60",
    "own session, no parent, no environment": "env -i setsid -f sleep 60",
    "twice over": "env -i setsid -f setsid -f sleep 60",
    "ignores SIGTERM": "setsid -f sh -c 'trap \"\" TERM; while :; do sleep 0.01; done'",
    "closed its pipes": "setsid -f sleep 60 </dev/null >/dev/null 2>&1",
    "stopped": "setsid -f sh -c 'kill -STOP $$'",
}


@pytest.mark.parametrize("escape", _ESCAPES.values(), ids=_ESCAPES)
def test_a_process_that_a_hook_left_running_is_ended(escape: str) -> None:
    begun = time.monotonic()
    assert _shell(f"{escape}\nexit 0").outcome == "succeeded"
    assert time.monotonic() - begun < 60  # half of what it would sleep


@pytest.mark.parametrize("escape", _ESCAPES.values(), ids=_ESCAPES)
def test_a_detached_process_is_ended_with_a_hung_hook(escape: str) -> None:
    result = _shell(f"{escape}\nsleep 60", timeout=0.2)
    assert result.outcome == "timed_out"
    assert result.duration_seconds < 30


def test_a_detached_process_of_one_of_two_hooks_ends_with_the_last(tmp_path: Path) -> None:
    stray = f"env -i setsid -f sh -c 'echo > {tmp_path}/$$; exec sleep 60'"
    ready = threading.Event()
    other = HookRun("other", Hook(shell="echo ready; sleep 60"), environment={}, on_line=lambda _: ready.set())
    thread = threading.Thread(target=other.run)
    thread.start()
    assert ready.wait(60.0)
    has_begun = f'[ -n "$(ls {tmp_path})" ]'
    assert _shell(f"{stray}; until {has_begun}; do sleep 0.01; done").outcome == "succeeded"
    other.cancel()
    thread.join(60.0)
    (pid,) = _pids(tmp_path)
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("is_urgent", [True, False])
def test_a_hook_that_delays_an_eviction_gets_less_time_to_end(
    monkeypatch: pytest.MonkeyPatch, *, is_urgent: bool
) -> None:
    # The grace of the other kind would be longer than the test waits.
    monkeypatch.setattr(hooks, "_URGENT_GRACE_SECONDS", 0.2 if is_urgent else 300.0)
    monkeypatch.setattr(hooks, "_GRACE_SECONDS", 300.0 if is_urgent else 0.2)
    ready = threading.Event()
    stubborn = Hook(shell="trap '' TERM; echo ready; while :; do sleep 0.1; done")
    run = HookRun("test", stubborn, environment={}, on_line=lambda _: ready.set(), instance=_INSTANCE)
    results: list[HookResult] = []
    thread = threading.Thread(target=lambda: results.append(run.run()))
    thread.start()
    assert ready.wait(60.0)
    run.cancel(is_urgent=is_urgent)
    thread.join(60.0)
    assert [result.outcome for result in results] == ["canceled"]


def test_a_hook_that_is_ending_gets_less_time_once_it_delays_an_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_URGENT_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(hooks, "_GRACE_SECONDS", 300.0)
    seen = {"ready": threading.Event(), "asked": threading.Event()}

    def note(line: str) -> None:
        if line in seen:  # bash also tells that its sleep was terminated
            seen[line].set()

    stubborn = Hook(shell="trap 'echo asked' TERM; echo ready; while :; do sleep 0.1; done")
    run = HookRun("test", stubborn, environment={}, on_line=note, instance=_INSTANCE)
    results: list[HookResult] = []
    thread = threading.Thread(target=lambda: results.append(run.run()))
    thread.start()
    is_ready = seen["ready"].wait(60.0)
    run.cancel()
    is_asked = seen["asked"].wait(60.0)
    run.cancel(is_urgent=True)
    thread.join(60.0)
    assert (is_ready, is_asked) == (True, True)
    assert [result.outcome for result in results] == ["canceled"]


@pytest.mark.skipif(not _IS_ROOT, reason="only root can mount /proc so that it hides something")
def test_a_hook_is_ended_whole_where_other_accounts_processes_cannot_be_read() -> None:
    sleep = f"sleep 60.{os.getpid()}"
    program = (
        "import ctypes, os; from scheduled_events_agent.hooks.run import HookRun;"
        "from scheduled_events_agent.policy import Hook;"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534);"
        f"hook = Hook(shell='setsid -f {sleep}; (setsid -f {sleep})');"
        "print(HookRun('test', hook, environment={}).run().detail)"
    )
    hide = 'mount -t proc -o hidepid=1 proc /proc && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", hide, "sh", sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount can be made here: {done.stderr}")
    assert (done.stderr, done.stdout) == ("", "exit code 0\n")
    assert not [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == sleep.split()]


def test_one_hook_does_not_end_the_processes_of_another(tmp_path: Path) -> None:
    seen = threading.Event()
    lines: list[str] = []

    def take(line: str) -> None:
        lines.append(line)
        seen.set()

    go = tmp_path / "go"
    survivor = "sleep 60 & setsid -f sleep 60; setsid sleep 60 & echo ready; "
    survivor += f"until [ -e {go} ]; do sleep 0.01; done; exit 5"
    results: list[HookResult] = []
    run = HookRun("other", Hook(shell=survivor), environment={}, on_line=take, instance=_INSTANCE)
    thread = threading.Thread(target=lambda: results.append(run.run()))
    thread.start()
    assert seen.wait(60.0)
    before = linux.find_leftovers(_INSTANCE)
    for _ in range(3):
        _shell("setsid -f sleep 60; sleep 60", timeout=0.05)
    assert len(before) >= 3
    go.touch()
    thread.join(60.0)
    assert [result.exit_code for result in results] == [5]


def test_children_that_multiply_are_all_ended(tmp_path: Path) -> None:
    code = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder = sys.argv[1]
while True:
    if len(os.listdir(folder)) < 150:
        child = os.fork()
        if child == 0:
            os.setsid()
        # Both write it: the parent starts no other child before this one is counted, however slow the machine is.
        open(f"{folder}/{child or os.getpid()}", "w").close()
        signal.alarm(120)  # also if nothing ends it
    else:
        time.sleep(0.1)  # hundreds of them would leave no processor for anybody else
"""
    run = HookRun(
        "test", Hook(run=(sys.executable, "-S", "-c", code, str(tmp_path))), environment={}, instance=_INSTANCE
    )
    results: list[HookResult] = []
    thread = threading.Thread(target=lambda: results.append(run.run()))
    thread.start()
    deadline = time.monotonic() + 60.0
    while len(_pids(tmp_path)) < 150:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.cancel()
    thread.join(60.0)
    assert [result.outcome for result in results] == ["canceled"]
    assert _left_over(_pids(tmp_path)) == []


def test_processes_that_start_each_other_anew_are_all_ended(tmp_path: Path) -> None:
    """Each waits for its child's end and then starts another, in a session of its own, at most 200 in all."""
    code = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder = sys.argv[1]
def live(depth):
    while len(os.listdir(folder)) < 200:
        child = os.fork()
        if child == 0:
            os.setsid()
            signal.alarm(120)  # also if nothing ends it
            open(f"{folder}/{os.getpid()}", "w").close()
            if depth:
                live(depth - 1)
            signal.pause()
        os.waitpid(child, 0)
live(5)
signal.pause()
"""
    hook = Hook(run=(sys.executable, "-S", "-c", code, str(tmp_path)), timeout=0.5)
    assert HookRun("test", hook, environment={}, instance=_INSTANCE).run().outcome == "timed_out"
    assert _left_over(_pids(tmp_path)) == []


def test_orphans_that_end_while_a_hook_runs_do_not_stay_as_zombies(tmp_path: Path) -> None:
    ended: queue.SimpleQueue[object] = queue.SimpleQueue()
    before = _children()
    executor = ThreadExecutor(cast("Any", None), ended.put, _INSTANCE, Settings)
    ready = tmp_path / "ready"
    text = f"for i in 1 2 3 4 5; do setsid -f true; done; sleep 0.2; touch {ready}; sleep 60"
    executor.start_hook(RunOnClear("test"), Hook(shell=text), environment={"SCHEDULED_EVENT_STAGE": "on_clear"})
    deadline = time.monotonic() + 30
    while not ready.exists() or len(_children(recursive=False) - before) > 1:  # the hook itself
        assert time.monotonic() < deadline
        executor.reap()  # as the daemon does in each cycle
        time.sleep(0.02)
    executor.cancel_all(1.0)
    ended.get(timeout=60)
    for thread in threading.enumerate():
        if thread.name == "hook-test":
            thread.join(60.0)


def test_exit_codes_of_other_children_are_left_to_their_parents() -> None:
    other = subprocess.Popen(["sh", "-c", "exit 9"])
    for _ in range(5):
        _shell("setsid -f true; true")
    assert other.wait() == 9


def test_a_hook_that_closes_its_output_early_is_waited_for() -> None:
    result = _shell("echo before; exec >/dev/null 2>&1; sleep 0.2; exit 6")
    assert (result.exit_code, result.tail) == (6, "before\n")


def test_a_hook_that_makes_its_output_non_blocking_and_fills_it_is_no_crash() -> None:
    code = """
import os
os.set_blocking(1, False)
os.write(1, b"ready\\n")
try:
    while True:
        os.write(1, b"x" * 4096)
except BlockingIOError:
    while True:
        try:
            os.write(1, b"x")
        except BlockingIOError:
            os._exit(0)
"""
    may_read = threading.Event()
    results: list[HookResult] = []
    hook = Hook(run=(sys.executable, "-S", "-c", code))

    def take(_: str) -> None:
        may_read.wait(60.0)

    run = HookRun("test", hook, environment={}, on_line=take)
    thread = threading.Thread(target=lambda: results.append(run.run()))
    thread.start()
    thread.join(1.0)  # the pipe is full long since, and no process reads it
    may_read.set()
    thread.join(60.0)
    assert [(result.outcome, result.exit_code) for result in results] == [("succeeded", 0)]
    assert results[0].tail == "x" * 4096


def test_a_path_with_undecodable_bytes_is_shown_with_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.fsdecode(b"/usr/bin:/x\xff"))
    results = [
        HookRun("test", hook, environment={}).run()
        for hook in (
            Hook(run=("no-such-program",)),
            Hook(run=("true",), cwd=os.fsdecode(b"/x\xff")),
            Hook(run=("no-such-program",), attempts=2, retry_delay=0.01),
        )
    ]
    assert [result.detail for result in results] == [
        "no such program on the PATH /usr/bin:/x?: no-such-program",
        "no such directory to run in: /x?",
        "no such program on the PATH /usr/bin:/x?: no-such-program",
    ]


def test_a_flood_is_read_slowed_down_and_does_not_starve_the_agent() -> None:
    lines: list[str] = []
    run = HookRun("test", Hook(shell="yes flood", timeout=3.0), environment={}, on_line=lines.append)
    results: list[HookResult] = []
    began, began_cpu = time.monotonic(), time.process_time()
    results.append(run.run())
    share = (time.process_time() - began_cpu) / (time.monotonic() - began)
    assert results[0].outcome == "timed_out"
    assert len(lines) == 1001
    assert results[0].tail.endswith("flood\nflood\n")
    assert share < 0.5  # a reader that is not slowed down takes all of a core


def test_output_that_is_not_utf_8_is_passed_on_with_marks() -> None:
    lines: list[str] = []
    hook = Hook(shell=r"printf 'caf\351 \377\n'; printf 'gr\303\274n\n'")
    result = HookRun("test", hook, environment={}, on_line=lines.append).run()
    assert lines == ["caf\N{REPLACEMENT CHARACTER} \N{REPLACEMENT CHARACTER}", "grün"]
    assert result.tail == "\n".join(lines) + "\n"


def test_a_text_that_has_no_bytes_is_no_reason_not_to_start() -> None:
    result = _shell('printf %s "$NAME"', env={"NAME": "a\ud800b"})
    assert (result.outcome, result.tail) == ("succeeded", "a?b")


def test_a_long_line_is_not_cut_within_a_character() -> None:
    lines: list[str] = []
    hook = Hook(shell="i=0; printf x; while [ $i -lt 3000 ]; do printf €; i=$((i+1)); done; echo")
    HookRun("test", hook, environment={}, on_line=lines.append).run()
    assert lines == ["x" + "€" * 666 + " (cut)"]


def test_the_linux_hook_environment_is_exactly_the_documented_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "LC_TIME": "de_DE.UTF-8",
        "TZ": "UTC",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "KUBERNETES_SERVICE_PORT": "443",
        "KUBERNETES_NODE": "vm-1",
        "KUBERNETES_PORT": "tcp://10.0.0.1:443",
        "KUBECONFIG": "/somewhere/.kube/config",
        "NOTIFY_SOCKET": "/run/notify",
        "SECRET": "x",
        "PYTHONPATH": "/tmp",
        "HOME": "/somewhere",
        "SCHEDULED_EVENTS_AGENT_CONFIG": "/etc/x",
    }.items():
        monkeypatch.setenv(name, value)
    hook = Hook(run=("env",), env={"COLOUR": "blue"})
    run = HookRun("test", hook, environment={"SCHEDULED_EVENT_ID": "A"}, instance="here")
    seen = dict(line.split("=", 1) for line in run.run().tail.splitlines())
    marker = seen.pop("SCHEDULED_EVENTS_AGENT_HOOK_RUN")
    account = pwd.getpwuid(os.geteuid())
    assert marker.startswith("here:")
    assert seen == {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "LC_TIME": "de_DE.UTF-8",
        "TZ": "UTC",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "KUBERNETES_SERVICE_PORT": "443",
        "KUBERNETES_NODE": "vm-1",
        "CREDENTIALS_DIRECTORY": "/etc/scheduled-events-agent/credentials",
        "HOME": account.pw_dir,
        "USER": account.pw_name,
        "LOGNAME": account.pw_name,
        "SHELL": account.pw_shell,
        "COLOUR": "blue",
        "SCHEDULED_EVENT_ID": "A",
        "SCHEDULED_EVENT_TIMEOUT_SECONDS": "300",
    }


def test_a_hook_inherits_no_descriptor_of_the_agent(tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        result = _shell("ls -l /proc/self/fd")
    assert "secret" not in result.tail


def test_a_file_that_is_no_program_is_not_started(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("#!/bin/sh\n")
    empty = tmp_path / "empty"
    empty.write_text("no first line")
    empty.chmod(0o755)
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    for path, detail in (
        (plain, f"not executable: {plain}"),
        (empty, f"neither a program nor a script that begins with #!: {empty}"),
        (script, f"the interpreter in the first line does not exist: {script}"),
    ):
        result = HookRun("test", Hook(run=(str(path),)), environment={}).run()
        assert (result.outcome, result.exit_code, result.detail) == ("not_started", None, detail)


def test_a_hook_has_run_if_any_attempt_started_its_program(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.symlink_to(sys.executable)
    hook = Hook(run=(str(program), "-c", f"import os; os.unlink({str(program)!r}); raise SystemExit(1)"))
    once = HookRun("test", hook, environment={}).run()
    assert (once.outcome, once.has_run) == ("failed", True)
    never = HookRun("test", hook, environment={}).run()
    assert (never.outcome, never.has_run) == ("not_started", False)
    program.symlink_to(sys.executable)
    again = HookRun("test", replace(hook, attempts=2, retry_delay=0.0), environment={}).run()
    assert (again.outcome, again.attempts, again.has_run) == ("not_started", 2, True)


def test_an_unknown_user_is_rejected() -> None:
    result = HookRun("test", Hook(run=("true",), user="no-such-user"), environment={}).run()
    assert (result.outcome, result.detail) == ("not_started", "no such user: no-such-user")


@pytest.mark.skipif(not _IS_ROOT, reason="only root can run a hook as another user")
def test_a_hook_runs_as_the_user_it_names_with_its_groups_and_home() -> None:
    hook = Hook(shell="id -un; id -Gn; echo $HOME $USER $LOGNAME; cat", user="nobody")
    run = HookRun("test", hook, environment={}, stdin=b"{}\n")
    assert run.run().tail == "nobody\nnogroup\n/nonexistent nobody nobody\n{}\n"


@pytest.mark.skipif(not _IS_ROOT, reason="only root can run a hook as another user")
def test_a_hook_of_another_user_is_ended_whole() -> None:
    assert _shell(
        "env -i setsid -f sleep 60; setsid -f sleep 60; sleep 60", user="nobody", timeout=0.2
    ).outcome == ("timed_out")


def test_an_agent_that_is_not_root_says_so_when_a_hook_names_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    result = HookRun("test", Hook(run=("true",), user="root"), environment={}).run()
    assert (result.outcome, result.detail) == (
        "not_started",
        "cannot run as root: only an agent that runs as root can",
    )


def test_hooks_left_running_by_a_killed_agent_are_ended_by_the_next() -> None:
    code = (
        "import sys; from scheduled_events_agent.hooks.run import HookRun;"
        "from scheduled_events_agent.policy.rules import Hook;"
        "hook = Hook(shell=f'setsid -f sleep 60; sleep 61 & trap \"\" TERM; echo ready; sleep 62; sleep 63');"
        "HookRun('test', hook, environment={}, instance=sys.argv[1],"
        "on_line=lambda line: print(line, flush=True)).run()"
    )
    agents = [
        subprocess.Popen([sys.executable, "-c", code, instance], stdout=subprocess.PIPE)
        for instance in (_INSTANCE + "-one", _INSTANCE + "-two")
    ]
    for agent in agents:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"ready\n"
        agent.kill()
        agent.wait()
        agent.stdout.close()
    assert len(linux.find_leftovers(_INSTANCE)) >= 6
    assert kill_orphans(_INSTANCE + "-one") >= 3
    assert linux.find_leftovers(_INSTANCE + "-one") == set()
    assert len(linux.find_leftovers(_INSTANCE + "-two")) >= 3
    assert kill_orphans(_INSTANCE + "-two") >= 3
    assert kill_orphans(_INSTANCE + "-two") == 0
    linux.reap_zombies()


def test_leftover_processes_are_ended_although_the_process_scan_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linux, "_LEFTOVER_GRACE_SECONDS", 0.0)  # it is over before the first look is
    program = "trap '' TERM; echo ready; while :; do sleep 0.01; done"
    environment = {**os.environ, linux._MARKER: f"{_INSTANCE}:1"}
    command = ["/bin/sh", "-c", program]
    # In a session of its own, as a hook is: of an orphan in ours nothing tells that it is not another library's.
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True) as left:
        assert left.stdout is not None
        assert left.stdout.readline() == b"ready\n"
        try:
            assert kill_orphans(_INSTANCE) >= 1
            assert linux.find_leftovers(_INSTANCE) == set()
        finally:
            left.kill()


def test_hooks_of_another_agent_with_a_nested_state_directory_are_left_alone() -> None:
    outer = f"/{_INSTANCE}"
    ready = threading.Event()
    run = HookRun(
        "test",
        Hook(shell="echo ready; exec sleep 60"),
        environment={},
        instance=f"{outer}/state.db",
        on_line=lambda _: ready.set(),
    )
    thread = threading.Thread(target=run.run)
    thread.start()
    assert ready.wait(60.0)
    assert [kill_orphans(other) for other in (outer, f"{outer}/", f"{outer}/state", "state.db")] == [0, 0, 0, 0]
    assert kill_orphans(f"{outer}/state.db") == 1
    thread.join(60.0)


def test_a_lost_exit_code_is_no_success() -> None:
    code = (
        "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN);"
        "from scheduled_events_agent.hooks.run import HookRun; from scheduled_events_agent.policy import Hook;"
        "r = HookRun('test', Hook(shell='exit 3'), environment={}).run(); print(r.outcome, r.exit_code, r.detail)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "failed None its exit code was lost\n"


@pytest.mark.parametrize("name", ["hook-test", "hook-output"])
def test_a_system_without_room_for_a_thread_is_no_crash(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    start = threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    result = _shell("setsid -f sleep 60; sleep 60")
    assert result.outcome == "not_started"
    assert result.detail.endswith("can't start new thread")


def test_the_end_of_a_hook_is_detected_at_once() -> None:
    true = shutil.which("true")
    assert true is not None
    durations = [HookRun("test", Hook(run=(true,)), environment={}).run().duration_seconds for _ in range(50)]
    assert min(durations) < 0.05  # polling at 50 ms would show in each of them, a busy machine only in some


def test_fifty_hooks_leave_no_descriptor_thread_or_process() -> None:
    process = psutil.Process()
    gc.collect()
    descriptors, threads, children = process.num_fds(), threading.active_count(), _children()
    for number in range(50):
        _shell(("true", "exit 1", "setsid -f sleep 60", "sleep 60", "nosuch")[number % 5], timeout=0.02)
    assert (process.num_fds(), threading.active_count()) == (descriptors, threads)
    assert _left_over(_children() - children) == []
