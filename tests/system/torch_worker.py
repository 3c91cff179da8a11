"""A worker of a training job on CPU: DDP over gloo; a checkpoint by DCP on SIGUSR1.

torch_worker.py DIRECTORY: a worker; torch_worker.py launch ...: torchrun, its arguments
"""

import signal
import sys
import time
from pathlib import Path

wanted = 0


def want_checkpoint(*_: object) -> None:
    global wanted  # noqa: PLW0603 - a signal handler can do no more than this
    wanted = 1


def say(text: str) -> None:
    """In one write: both workers have the same log, and torchrun leaves them without a buffer."""
    print(f"{text}\n", end="", flush=True)


def do_without_libuv() -> None:
    """Debian builds PyTorch without libuv, which torchrun and its workers take for granted."""
    import torch.distributed as dist

    make = dist.TCPStore.__init__
    dist.TCPStore.__init__ = lambda *arguments, **options: make(*arguments, **(options | {"use_libuv": False}))


def launch() -> None:
    from torch.distributed import run

    run.main(sys.argv[2:])


def work(directory: Path) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    own = f"of-rank-{rank}"
    state = {"weight": model.module.weight.detach(), own: torch.tensor([0])}
    complete = sorted(directory.glob("step-*/.metadata"), key=lambda path: int(path.parent.name[5:]))
    if complete:
        dcp.load(state, checkpoint_id=str(complete[-1].parent))
    step = int(state[own])
    say(f"rank {rank} begins after step {step} with {float(state['weight'].sum()):.6f}")
    while True:
        optimizer.zero_grad()
        model(torch.ones(1, 100)).square().sum().backward()
        optimizer.step()
        step += 1
        flag = torch.tensor([wanted])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item():
            globals()["wanted"] = 0
            state[own] = torch.tensor([step])
            dcp.save(state, checkpoint_id=str(directory / f"step-{step}"))
            say(f"rank {rank} has saved step {step} with {float(state['weight'].sum()):.6f}")
        if rank == 0:
            told = directory / "progress.unfinished"
            told.write_text(str(step))
            told.replace(directory / "progress")
        time.sleep(0.02)


if sys.argv[1] == "launch":
    do_without_libuv()
    launch()
else:
    # As early as can be: without a handler, the signal would end the worker.
    signal.signal(signal.SIGUSR1, want_checkpoint)  # type: ignore[attr-defined,unused-ignore] # not on Windows
    do_without_libuv()
    work(Path(sys.argv[1]))
