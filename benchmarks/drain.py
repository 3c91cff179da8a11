"""``python -m benchmarks.drain``: the agent's drain of a Kubernetes node beside ``kubectl drain``.

Both drain the same node of a stand-in for the API server in this process, turn about: three ReplicaSets, each with
a budget that allows two pods at a time, whose replacements are ready on another node after two seconds. Measured
are the time from exec to exit, the requests, and the most memory that the process of the drain had; each figure is
the median of the runs, and the ratio that of the medians.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests" / name) for name in ("e2e", "fixtures", "kube_api")]

from kube_access import ADMIN  # noqa: E402
from kube_api import KubeApi  # noqa: E402
from kube_controllers import READY_AFTER  # noqa: E402
from kube_objects import PODS  # noqa: E402
from kube_samples import budget, set_of  # noqa: E402
from memory_peak import wait_for_peak  # noqa: E402
from receiver import wait_until  # noqa: E402

assert sys.platform != "win32"


class Drained(NamedTuple):
    """What one drain took."""

    seconds: float
    requests: int
    peak_mib: float


def main() -> int:
    """Exits with 1 if a drain fails; the figures are not judged."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.drain", description="Drain a node beside kubectl drain."
    )
    parser.add_argument("--pods", type=int, default=30, help="how many pods the node has (default: 30)")
    parser.add_argument("--runs", type=int, default=5, help="how often each drains it (default: 5)")
    arguments = parser.parse_args()
    ours: list[Drained] = []
    theirs: list[Drained] = []
    for number in range(arguments.runs):
        ours.append(measure([sys.executable, "-m", "scheduled_events_agent", "kubernetes"], arguments.pods))
        theirs.append(measure(["kubectl"], arguments.pods))
        print(f"run {number + 1}: {ours[-1].seconds:.1f} s, kubectl {theirs[-1].seconds:.1f} s", file=sys.stderr)
    print(f"{'figure':<32}{'agent':>9}{'kubectl':>9}{'ratio':>7}")
    for name, unit, field in (("time", "s", 0), ("requests", "", 1), ("peak of memory", "MiB", 2)):
        our, their = (statistics.median(one[field] for one in side) for side in (ours, theirs))
        figure = f"{name}, {arguments.pods} pods" + (f", {unit}" if unit else "")
        print(f"{figure:<32}{our:>9.1f}{their:>9.1f}{our / their:>7.2f}")
    return 0


def measure(program: list[str], count: int) -> Drained:
    """Drain a node with so many pods."""
    with TemporaryDirectory() as directory, KubeApi(Path(directory)) as api:
        api.add_node("vm-1")
        for name in ("web", "shop", "mail"):
            api.add(set_of("ReplicaSet", name, count // 3, {READY_AFTER: "2"}))
            api.add(budget(name, maxUnavailable=2))
        wait_until(lambda: is_ready(api, count // 3 * 3), "all pods are ready")
        api.add_node("vm-2")
        api.calls.clear()
        options = ["--kubeconfig", str(api.kubeconfig(ADMIN))]
        if program == ["kubectl"]:
            command = ["kubectl", *options, f"--cache-dir={directory}/cache", "drain", "vm-1", "--timeout=10m"]
        else:
            command = [*program, "drain", *options, "--node", "vm-1", "--timeout", "10m"]
        begun_at = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        peak_mib = wait_for_peak(process)
        seconds = time.monotonic() - begun_at
        if process.returncode != 0 or api.pod_names("vm-1"):
            sys.exit(f"{' '.join(command)}: exit code {process.returncode}, left: {api.pod_names('vm-1')}")
        return Drained(seconds, len(api.calls), peak_mib)


def is_ready(api: KubeApi, count: int) -> bool:
    conditions = [one for pod in api.store.list(PODS) for one in pod["status"].get("conditions", ())]
    return sum(bool(one["type"] == "Ready") for one in conditions) == count


if __name__ == "__main__":
    sys.exit(main())
