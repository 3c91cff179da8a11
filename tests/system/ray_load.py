"""Work for a Ray cluster: tasks of a second each, on every CPU, and an actor that is called ten times a second.

ray_load.py ADDRESS DIRECTORY

Each start and end of a task is a file in the directory (N.starts.NODE.PID, N.ends); "actor" has a line for each
answer of the actor: the time, and the node that it is on. The tasks end when there is a file "stop".
"""

import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

address, directory = sys.argv[1], Path(sys.argv[2])
ray.init(address, log_to_driver=False)
spot = next(node["NodeID"] for node in ray.nodes() if "spot" in node["Resources"])


@ray.remote(num_cpus=1, max_retries=-1)  # type: ignore[untyped-decorator]
def work(number: int) -> None:
    import os

    node = "spot" if ray.get_runtime_context().get_node_id() == spot else "other"
    (directory / f"{number}.starts.{node}.{os.getpid()}").touch()
    time.sleep(1)
    (directory / f"{number}.ends").touch()


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Counter:
    def where(self) -> str:
        return "spot" if ray.get_runtime_context().get_node_id() == spot else "other"


def start_actor() -> Any:
    """Start it on the node that is to be drained; it may live on any."""
    while True:
        strategy = NodeAffinitySchedulingStrategy(spot, soft=True)
        actor = Counter.options(scheduling_strategy=strategy).remote()  # type: ignore[attr-defined]
        if ray.get(actor.where.remote()) == "spot":
            return actor
        ray.kill(actor)


actor = start_actor()
running: list[Any] = []
number = 0
with (directory / "actor").open("a") as answers:
    while running or not (directory / "stop").exists():
        while len(running) < 4 and not (directory / "stop").exists():
            running.append(work.remote(number))
            number += 1
        answers.write(f"{time.time()} {ray.get(actor.where.remote())}\n")
        answers.flush()
        _, running = ray.wait(running, timeout=0.1)
print(f"tasks: {number}", flush=True)
