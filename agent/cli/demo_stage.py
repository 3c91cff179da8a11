"""What the demos have in common: agents that run, and the lines that show what they and Azure do."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

from agent import AgentError
from agent.simulator import Simulator

_SHOWN_MESSAGES = (
    "decided", "preparing", "waits", "hook finished", "approving", "held", "recovering", "closed",
)  # fmt: skip


class Shown:
    """Prints one line at a time, and knows what the agents have said. For any thread."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._changed = threading.Condition()
        self._said: set[tuple[str, str, str]] = set()

    def line(self, source: str, text: str) -> None:
        with self._changed:
            lead = f"{time.monotonic() - self.began:5.1f}s  {source:6} " if source else ""
            print(f"{lead}{text}", flush=True)

    def say(self, agent: str, message: str, event_id: str) -> None:
        """It is in the agent's log."""
        with self._changed:
            self._said.add((agent, message, event_id))
            self._changed.notify_all()

    def wait_for(self, agent: str, message: str, event_id: str, seconds: float) -> bool:
        """Whether it is in the agent's log by then."""
        with self._changed:
            return self._changed.wait_for(lambda: (agent, message, event_id) in self._said, seconds)


def show_azure(azure: Simulator, shown: Shown) -> None:
    for happening in azure.follow():
        event = happening.event
        if event is None:
            continue
        name = f"{event.plan.type} {event.id[:8]}"
        notice = (event.not_before_at - event.scheduled_at).total_seconds()
        words = {
            "scheduled": f"announces {name}, at the earliest in {notice:.0f}s",
            "approved": f"gets the approval of {name}",
            "started": f"starts {name}",
            "gone": f"is done with {name}",
        }
        if happening.kind in words:
            shown.line("Azure", words[happening.kind])


class ShownAgent:
    """The agent of one VM, as a process whose log is shown."""

    def __init__(
        self, config: Path, state_dir: Path, shown: Shown, name: str = "agent", hooks: str = "hook"
    ) -> None:
        """``name`` and ``hooks``: before the lines of the agent and of its hooks."""
        # As this program was, wherever its modules were found: by -m, a script of pip's, a package's launcher.
        this_program = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]]
        self._command = [*this_program, "run", "--config", str(config), "--state-dir", str(state_dir)]
        self._shown = shown
        self._name = name
        self._hooks = hooks
        self._started: list[tuple[subprocess.Popen[str], threading.Thread]] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True, encoding="utf-8")
        reader = threading.Thread(target=self._show, args=(process,), daemon=True)
        reader.start()
        self._started.append((process, reader))

    def kill(self) -> None:
        """It has no time to do anything."""
        process, _ = self._started[-1]
        process.kill()
        process.wait()

    def __exit__(self, kind: object, *_: object) -> None:
        code = self._started[-1][0].poll()
        for process, reader in self._started:
            process.terminate()  # on Windows that is a kill, which the agent takes as well
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
            reader.join()
            process.__exit__(None, None, None)
        if kind is None and code is not None:
            raise AgentError(f"{self._name} ended by itself with exit code {code}")

    def _show(self, process: "subprocess.Popen[str]") -> None:
        for line in process.stderr or ():
            try:
                entry = json.loads(line)
            except ValueError:
                self._shown.line(self._name, line.rstrip())
                continue
            message, reason = entry.get("message", ""), entry.get("reason", "")
            if message == "hook output":
                self._shown.line(self._hooks, f"{entry['hook']}: {entry['line']}")
            elif message in _SHOWN_MESSAGES:
                self._shown.line(self._name, f"approves: {reason}" if message == "approving" else reason)
            elif entry.get("level") in ("warning", "error"):
                self._shown.line(self._name, f"{message}: {reason}" if reason else message)
            self._shown.say(self._name, message, entry.get("event_id", ""))
