"""The signals of the command ``run``, in a process of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no other process can send it these signals")

# The main thread waits as if for a message, without end. The signal goes to another thread.
_PROGRAM = """
import os, queue, signal, sys, threading, time
from scheduled_events_agent.cli.run import handle_signals

calls = queue.SimpleQueue()
handlers = {"SIGTERM": lambda: calls.put("stop"), "SIGHUP": lambda: calls.put("reload"), "SIGNONE": os.abort}
handle_signals(handlers, wake=lambda: calls.put("wake"))

def get_the_signal():
    time.sleep(0.3)  # the main thread has begun to wait
    signal.pthread_kill(threading.get_ident(), getattr(signal, sys.argv[1]))

threading.Thread(target=get_the_signal).start()
print(*sorted((calls.get(), calls.get())))
"""


@pytest.mark.parametrize(("name", "call"), [("SIGTERM", "stop"), ("SIGHUP", "reload")])
def test_a_signal_that_another_thread_gets_is_handled_while_the_main_thread_waits(name: str, call: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, name], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == (f"{call} wake\n", "", 0)


# The signal comes when all of the start is done but the last step.
_EARLY = """
import os, signal, sys
from scheduled_events_agent import cli
from scheduled_events_agent.cli import run

def get_the_signal_first(handlers, wake):
    os.kill(os.getpid(), signal.SIGHUP)
    reload_and_stop = lambda: (print("reload"), handlers["SIGHUP"](), handlers["SIGTERM"]())
    handle_signals({**handlers, "SIGHUP": reload_and_stop}, wake)

handle_signals, run.handle_signals = run.handle_signals, get_the_signal_first
sys.exit(cli.main())
"""


def test_a_reload_that_is_requested_during_the_start_waits_for_its_end(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("imds: {endpoint: 'http://127.0.0.1:1'}\nagent: {listen: 'off'}\n", encoding="utf-8")
    options = ["run", f"--config={policy}", f"--state-dir={tmp_path / 'state'}"]
    done = subprocess.run(
        [sys.executable, "-c", _EARLY, *options], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.stdout, done.returncode) == ("reload\n", 0), done.stderr
