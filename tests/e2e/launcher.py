"""A distributed training job: a launcher with two workers, which write checkpoints together on SIGUSR1.

launcher.py DIRECTORY KIND

The launcher does with signals what torchrun does: it hands SIGTERM to the workers and waits for them, and does not
handle SIGUSR1. The kinds write as the frameworks do: "dcp" writes shards and then renames ".metadata" into place;
"lightning" copies one file to its place, bit by bit; "huggingface" writes "trainer_state.json" while the other
worker still writes its part; "stuck" never comes to an end; "deaf" has a launcher alone that handles no signal.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PAUSE = 0.8  # longer than the hooks under test wait for a change
directory, kind = Path(sys.argv[1]), sys.argv[2]


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def write(path: Path, done: Path | None = None) -> None:
    """Write a file in two halves, the second one after a pause, and after another file is there."""
    with path.open("w") as file:
        file.write("first ")
        file.flush()
        if done is not None:
            wait_for(done)
        time.sleep(PAUSE)
        file.write("second")


def save(rank: int, step: int) -> None:
    folder = directory / (f"checkpoint-{step}" if kind == "huggingface" else f"step-{step}")
    if kind == "lightning":
        if rank == 0:
            write(directory / f"step={step}.ckpt")
        return
    folder.mkdir(exist_ok=True)
    state = folder / "trainer_state.json"
    if kind == "huggingface":
        if rank == 0:
            wait_for(folder / "rng_state_1.pth")
            state.write_text("{}")
        else:
            write(folder / "rng_state_1.pth", state)
        return
    if kind == "stuck":
        if rank == 0:
            (folder / "__0_0.distcp").write_text("first ")
        return
    shard = folder / f"__{rank}_0.distcp"
    write(shard.with_suffix(".part"))
    shard.with_suffix(".part").rename(shard)
    if rank == 0:
        wait_for(folder / "__1_0.distcp")
        (folder / ".metadata.tmp").write_text("all")
        (folder / ".metadata.tmp").rename(folder / ".metadata")


def work(rank: int) -> None:
    wanted = step = 0

    def want_checkpoint(*_: object) -> None:
        nonlocal wanted
        wanted += 1

    signal.signal(signal.SIGUSR1, want_checkpoint)  # type: ignore[attr-defined,unused-ignore] # not on Windows
    print(f"worker {rank} is ready", flush=True)
    while True:
        if wanted > step:
            step += 1
            save(rank, step)
            print(f"worker {rank} has saved {step}", flush=True)
        time.sleep(0.01)


def launch() -> None:
    workers: list[subprocess.Popen[bytes]] = []

    def hand_on(*_: object) -> None:
        for worker in workers:
            worker.terminate()

    signal.signal(signal.SIGTERM, hand_on)
    for rank in range(2):
        command = [sys.executable, "-IS", __file__, *sys.argv[1:]]
        workers.append(subprocess.Popen(command, env={"RANK": str(rank)}))
    for worker in workers:
        worker.wait()


if kind == "deaf":
    print("deaf", flush=True)
    time.sleep(300)
elif "RANK" in os.environ:
    work(int(os.environ["RANK"]))
else:
    launch()
