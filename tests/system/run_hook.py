"""Runs one hook as the agent would, inside a machine: told what by JSON on standard input, its result as JSON.

    {"hook": {"unit": "a.service"}, "environment": {}, "stdin": "", "seconds": 5, "cancel_after": 1, "at_once": 2}

All but the hook may be missing. ``cancel_when``: a file; once it is there, the run is canceled. ``at_once``: so
many runs of it at a time; then the result is a list.
"""

import json
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from agent.hooks import HookQueues, HookRun
from agent.policy import Hook


def _run(task: dict[str, Any], queues: HookQueues) -> dict[str, Any]:
    lines: list[str] = []
    run = HookRun(
        "test",
        msgspec.convert(task["hook"], Hook),
        environment=task.get("environment", {}),
        stdin=task.get("stdin", "").encode(),
        deadline=time.monotonic() + task["seconds"] if "seconds" in task else None,
        on_line=lines.append,
        queues=queues,
    )
    if "cancel_after" in task:
        threading.Timer(task["cancel_after"], run.cancel).start()
    if "cancel_when" in task:
        threading.Thread(target=_cancel_when, args=(run, Path(task["cancel_when"])), daemon=True).start()
    result: dict[str, Any] = msgspec.to_builtins(run.run())
    return {**result, "lines": lines}


def _cancel_when(run: HookRun, file: Path) -> None:
    while not file.exists():
        time.sleep(0.02)
    run.cancel()


def _main() -> None:
    task: dict[str, Any] = json.load(sys.stdin)
    queues = HookQueues(deque)
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(_run, task, queues) for _ in range(task.get("at_once", 1))]
    results = [run.result() for run in runs]
    print(json.dumps(results if "at_once" in task else results[0]))


if __name__ == "__main__":
    _main()
