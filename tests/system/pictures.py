"""Takes the documentation's pictures of the status page: ``make pictures``, as root on Debian.

The agent is the real one, Azure is the simulator, and the policies are those of the pages that show the pictures.
All of it runs in namespaces of its own, so that the default paths, ports and endpoint are free. There the agent is
where its packages install it, for the page shows the path of its runbook.
"""

import sys

if sys.platform == "win32":
    raise ImportError("the browser comes from Debian's packages")

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from itertools import takewhile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "fixtures"))

import apt
from chromium import Tab, browser, install
from container import CHECKOUT
from test_tutorial import Shell, section, steps

PACKAGE = CHECKOUT / "agent/scheduled_events_agent"
WIDTH = 900
_COLORS = "64"  # more make a file larger, and no picture better
_TRIES = 60  # a second apart, until an agent listens
# Lays $ROOT over this machine's folders (only the home is writable); adds Azure's address, and a
# state directory: on a disk, for the page warns of one in memory.
_ENTER = """
ip link set lo up
ip address add 169.254.169.254 dev lo
for folder in etc home usr var/lib; do
    mount -t overlay overlay -o "lowerdir=$ROOT/$folder:/$folder" "/$folder"
done
mount --bind "$ROOT/home/you" /home/you
mkdir -m 700 "$ROOT/state" && mount --bind "$ROOT/state" /var/lib/scheduled-events-agent
exec "$@"
"""
_CODE = "/usr/lib/scheduled-events-agent"
_RUNBOOK = "/usr/share/scheduled-events-agent/runbook.md"
_UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_FAILING_HOOK = "#!/bin/sh\nexit 1\n"


def main() -> int:
    """Take the pictures; exits with 1 if that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", metavar="DIR", type=Path, default=CHECKOUT / "docs/pictures")
    parser.add_argument("--inside", metavar="ROOT", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        take_all(arguments.inside)
        return 0
    install()
    apt.need("ip", "iproute2")
    apt.need("curl")
    apt.need("pngquant")
    with tempfile.TemporaryDirectory() as root:
        lay_out(Path(root))
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        environment = {**os.environ, "PATH": path, "ROOT": root, "HOME": "/home/you"}
        command = [*_UNSHARE, "sh", "-ec", _ENTER, "sh", sys.executable, __file__, "--inside", root]
        subprocess.run(command, env=environment, check=True)
        for picture in sorted(Path(root).glob("*.png")):  # there, the checkout may be read-only
            print(f"{picture.name}: {picture.stat().st_size:,} bytes")
            shutil.copy(picture, arguments.output)
    return 0


def lay_out(root: Path) -> None:
    """What a machine with a package and the policy of README.md has; its hooks fail."""
    shutil.copytree(PACKAGE, root / _CODE[1:] / PACKAGE.name)
    runbook = root / _RUNBOOK[1:]
    runbook.parent.mkdir(parents=True)
    shutil.copy(CHECKOUT / "docs/runbook.md", runbook)
    for folder in ("etc/scheduled-events-agent/hooks", "home/you", "var/lib/scheduled-events-agent"):
        (root / folder).mkdir(parents=True)
    readme = (CHECKOUT / "README.md").read_text("utf-8")
    (policy,) = re.findall(r"^```yaml\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    (root / "etc/scheduled-events-agent/policy.yaml").write_text(policy, "utf-8")
    for hook in re.findall(r"run: \[/(etc/[\w/-]+)\]", policy):
        (root / hook).write_text(_FAILING_HOOK)
        (root / hook).chmod(0o755)


def take_all(folder: Path) -> None:
    """Run agents and take the pictures; call it in the namespaces, which end what it leaves running."""
    with browser() as one:
        tab = one.tab()
        tab.call("Emulation.setScrollbarsHidden", hidden=True)
        tab.look(WIDTH)
        take_held(tab, folder / "status-held.png")
        take_tutorial(tab, folder / "tutorial-drained.png", folder / "tutorial-held.png")


def open_shell() -> Shell:
    """A shell whose agent is the one that ``lay_out`` has installed."""
    shell = Shell(Path.home())
    shell.run(f"export PYTHONPATH={_CODE}")
    return shell


def take_held(tab: Tab, picture: Path) -> None:
    """The page of an installed agent whose drain has failed."""
    shell = open_shell()
    shell.run("cd")
    shell.run("scheduled-events-agent simulate --vm web-3 --bind 169.254.169.254 --port 80 &")
    shell.run("scheduled-events-agent run &")
    show(tab, shell, "http://127.0.0.1:9769/", "is held", "(failed)", _RUNBOOK)
    tab.click("details[open] summary")  # the timeline makes the picture too long
    shoot(tab, picture, "pending")


def take_tutorial(tab: Tab, drained: Path, held: Path) -> None:
    """The page after step 5 of the tutorial, and in step 6, of the agent that its commands start."""
    shell = open_shell()
    page = "http://127.0.0.1:9770/"
    for step in (*steps(section(3, 3)), *steps(section(5, 5))):
        shell.run(step.command)
    show(tab, shell, page, "is over: completed")
    shoot(tab, drained, "recent")
    shell.run("wait %?simulate")
    for step in takewhile(lambda step: " status " not in step.command, steps(section(6, 6))):
        shell.run(step.command)
    show(tab, shell, page, "is held", "(failed)", _RUNBOOK)
    shoot(tab, held, "pending")


def show(tab: Tab, shell: Shell, page: str, *words: str) -> None:
    """Open the page; returns when all of it is shown, with these words. The timeline comes later than the rest."""
    shell.run(f"curl --silent --retry {_TRIES} --retry-connrefused --retry-delay 1 --output /dev/null {page}")
    tab.open(page)
    tab.wait("document.querySelector('footer') && !document.getElementById('main').ariaBusy")
    for each in words:
        tab.wait(f"document.body.innerText.includes({each!r})")


def shoot(tab: Tab, picture: Path, last: str) -> None:
    """Take the page from its top to the end of the section ``last``, in few colors."""
    tab.screenshot(picture, f"section[aria-labelledby={last}]")
    subprocess.run(["pngquant", "--force", "--nofs", "--speed=1", "--ext=.png", _COLORS, picture], check=True)


if __name__ == "__main__":
    sys.exit(main())
