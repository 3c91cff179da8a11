"""A real Ray on loopback: a head with one CPU and a node with two, as units; and work for them."""

import sys

if sys.platform == "win32":
    raise ImportError("the hooks are shell scripts for Linux")

import contextlib
import fcntl
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from examples import ServiceManager, Unit, copy_hooks, example
from harness import CHECKOUT, PATIENCE
from ports import free_port

VERSION = "2.60.0"
CACHE = CHECKOUT / f".cache/ray-{VERSION}"
HEAD, NODE = "127.0.0.2", "127.0.0.3"
UNIT = "ray.service"


def install() -> Path:
    """Where the programs of Ray are; from the package index, if it is not here yet (about 90 MB)."""
    CACHE.parent.mkdir(exist_ok=True)
    ready = CACHE / "ready"
    with CACHE.with_name("ray.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(CACHE)], check=True, timeout=300)
            pip = [str(CACHE / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, f"ray=={VERSION}"], check=True, timeout=600)
            ready.touch()
    return CACHE / "bin"


@dataclass(frozen=True)
class Work:
    """The results of the work: tasks, starts of tasks that did not end, the actor's longest silence."""

    tasks: int
    lost: int
    silence_seconds: float


class Cluster:
    """Head, node and work, below one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.results = directory / "results"
        self.results.mkdir()
        self.hooks = copy_hooks(directory)
        self.programs = install()
        self.address = f"{HEAD}:{free_port()}"
        self._session = tempfile.mkdtemp(prefix="ray-")  # a short name, for the paths of sockets
        self._load: subprocess.Popen[bytes] | None = None
        python = str(self.programs / "python")
        settings = {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        }
        # Restart=on-failure, as the page has it: Ray gives a start up after 30 s, which a busy machine may need.
        again = ("/bin/sh", "-c", 'until "$@"; do sleep 10; done', "ray")
        start = (*again, "/usr/bin/env", "-i", *(f"{key}={value}" for key, value in settings.items()))
        start = (*start, python, str(self.programs / "ray"), "start", "--block", "--disable-usage-stats")
        start = (*start, "--object-store-memory=100000000")
        port = self.address.rpartition(":")[2]
        head = (
            "--head",
            f"--port={port}",
            f"--node-ip-address={HEAD}",
            "--num-cpus=1",
            "--include-dashboard=false",
            f"--temp-dir={self._session}",
        )
        node = (
            f"--address={self.address}",
            f"--node-ip-address={NODE}",
            "--num-cpus=2",
            '--resources={"spot": 1}',
        )
        units = {
            "head.service": Unit((*start, *head)),
            UNIT: Unit((*start, *node)),
        }
        self.manager = ServiceManager(directory / "bin", units)

    def policy(self, endpoint: str) -> str:
        """The shipped one, for this cluster."""
        variables = {
            "PATH": f"{self.manager.directory}:/usr/bin:/bin",
            "RAY_MARK": str(self.directory / "mark"),
            "RAY_WAIT": '"15"',
        }
        text = "".join(f"      {key}: {value}\n" for key, value in variables.items())
        changes = {"env: &ray\n": f"env: &ray\n{text}", "/opt/ray/bin/ray": str(self.programs / "ray")}
        return example("ray-node.yaml", self.hooks, endpoint, changes)

    def run_hook(self, name: str, **more: str) -> subprocess.CompletedProcess[str]:
        variables = {
            "PATH": f"{self.manager.directory}:/usr/bin:/bin",
            "RAY_MARK": str(self.directory / "mark"),
            "RAY_COMMAND": str(self.programs / "ray"),
        }
        command = [str(self.hooks / name)]
        return subprocess.run(
            command, env=variables | more, capture_output=True, text=True, timeout=4 * PATIENCE, check=False
        )

    def nodes(self) -> int:
        """How many are alive; 0 if the head does not answer."""
        command = [str(self.programs / "ray"), "status", "--address", self.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        active = re.search(r"^Active:\n(.*?)^Pending", done.stdout, re.MULTILINE | re.DOTALL)
        return len(re.findall(r"^ 1 ", active[1], re.MULTILINE)) if active else 0

    def wait_nodes(self, count: int) -> None:
        deadline = time.monotonic() + 4 * PATIENCE
        while (found := self.nodes()) != count:
            assert time.monotonic() < deadline, (
                f"{found} nodes, not {count}: {self.manager.log.read_text('utf-8')}"
            )
            time.sleep(0.2)

    def start_work(self) -> None:
        """Start it, and wait until tasks have ended on the node."""
        load = Path(__file__).with_name("ray_load.py")
        with (self.directory / "load.log").open("wb") as log:
            self._load = subprocess.Popen(
                [str(self.programs / "python"), str(load), self.address, str(self.results)],
                stdout=log,
                stderr=log,
                env={"PATH": f"{self.programs}:/usr/bin:/bin", "RAY_USAGE_STATS_ENABLED": "0"},
            )
        self.wait_answers()
        deadline = time.monotonic() + PATIENCE
        while not self.tasks("starts.spot"):
            assert time.monotonic() < deadline, self._said_by_load()
            time.sleep(0.1)

    def wait_answers(self) -> None:
        """Wait until the actor has answered a few times more."""
        assert self._load is not None
        before = len(self.answers())
        deadline = time.monotonic() + 2 * PATIENCE
        while len(self.answers()) < before + 5:
            assert time.monotonic() < deadline, self._said_by_load()
            assert self._load.poll() is None, self._said_by_load()
            time.sleep(0.1)

    def tasks(self, what: str) -> list[Path]:
        return [*self.results.glob(f"*.{what}*")]

    def answers(self) -> list[tuple[float, str]]:
        """Answers of the actor: when, and from which node."""
        path = self.results / "actor"
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        return [(float(when), where) for when, _, where in (line.partition(" ") for line in lines) if where]

    def finish_work(self) -> Work:
        """Let the tasks end."""
        assert self._load is not None
        (self.results / "stop").touch()
        assert self._load.wait(4 * PATIENCE) == 0, self._said_by_load()
        times = [when for when, _ in self.answers()]
        silence = max(later - earlier for earlier, later in pairwise(times))
        ends = len(self.tasks("ends"))
        return Work(ends, len(self.tasks("starts")) - ends, silence)

    def _said_by_load(self) -> str:
        return (self.directory / "load.log").read_text("utf-8")

    def close(self) -> None:
        """End the work; once head and node have ended."""
        if self._load is not None:
            self._load.kill()
            self._load.wait(PATIENCE)
        shutil.rmtree(self._session)


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    """Head and node, both up."""
    made = Cluster(directory)
    with contextlib.closing(made), made.manager as manager:
        manager.start("head.service")
        made.wait_nodes(1)
        manager.start(UNIT)
        made.wait_nodes(2)
        yield made
