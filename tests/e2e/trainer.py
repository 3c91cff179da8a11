"""A training job: fits a line, writes a checkpoint every so many steps and on SIGUSR1, goes on from the last one.

trainer.py CHECKPOINT STEPS_BETWEEN_CHECKPOINTS
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

checkpoint, every = Path(sys.argv[1]), int(sys.argv[2])
wanted = False


def want_checkpoint(*_: object) -> None:
    global wanted  # noqa: PLW0603 - a signal handler can do no more than this
    wanted = True


def save(state: dict[str, float]) -> None:
    """Write under another name, flush to disk, rename: what is called ``checkpoint`` is always complete."""
    unfinished = checkpoint.with_suffix(".unfinished")
    text = json.dumps(state)
    with unfinished.open("w") as file:
        file.write(text[:10])
        file.flush()
        time.sleep(0.2)  # a real one takes its time as well
        file.write(text[10:])
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(checkpoint)


# As early as can be: without a handler, the signal would end the job.
signal.signal(signal.SIGUSR1, want_checkpoint)  # type: ignore[attr-defined,unused-ignore] # not on Windows
state: dict[str, float] = {"step": 0, "slope": 0.0, "offset": 0.0}
if checkpoint.exists():
    state = json.loads(checkpoint.read_text())
print(f"begins after step {state['step']}", flush=True)
while True:
    x = state["step"] % 7 - 3.0
    error = state["slope"] * x + state["offset"] - (2.0 * x + 1.0)
    state["slope"] -= 0.05 * error * x
    state["offset"] -= 0.05 * error
    state["step"] += 1
    print(f"step {state['step']}", flush=True)
    if wanted or state["step"] % every == 0:
        wanted = False
        save(state)
    time.sleep(0.01)
