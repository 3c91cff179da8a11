"""Promises of docs/security.md about the code as it is written: no shell, no evaluation, pinned libraries."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from scheduled_events_agent.policy import yaml_nodes

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "agent/scheduled_events_agent").rglob("*.py"))

# The two places that make a command line for a shell of what a `shell:` hook says, and nothing else.
SHELLS = {
    "agent/scheduled_events_agent/host/linux/processes.py": {"/bin/sh"},
    "agent/scheduled_events_agent/host/windows/processes.py": {"cmd.exe"},
    "agent/scheduled_events_agent/cli/completion.py": {
        "bash",
        "zsh",
    },  # names of shells: it prints, and starts none
}
_SHELL = re.compile(r"(^|[\\/])((ba|da|z|k)?sh|cmd\.exe|cmd)$")
STARTERS = re.compile(
    r"os\.(system|popen|spawn\w*|exec\w*|posix_spawn\w*|startfile)|pty\.spawn|subprocess\.(getoutput|getstatusoutput)"
    r"|asyncio\.create_subprocess\w*"
)
EVALUATORS = re.compile(
    r"eval|exec|compile|__import__|tempfile\.mktemp|yaml\.(load|load_all|full_load\w*|unsafe_load\w*|safe_load\w*)"
)
UNSAFE_MODULES = {
    "code", "ctypes.util", "dill", "ftplib", "marshal", "pickle", "pty", "requests", "runpy", "shelve",
    "telnetlib", "urllib.request", "xml", "xmlrpc",
}  # fmt: skip


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def nodes(kind: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kind):
                yield name_of(path), node


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    for file, node in nodes(ast.Call):
        assert isinstance(node, ast.Call)
        yield file, ast.unparse(node.func), node


def test_no_shell_is_started_but_for_shell_hooks() -> None:
    found = [
        f"{file}: {ast.unparse(call)}"
        for file, name, call in calls()
        if STARTERS.fullmatch(name)
        or (name.startswith("subprocess.") and any(keyword.arg in ("shell", None) for keyword in call.keywords))
    ]
    # The command itself, in another mode.
    again = "os.execv(sys.executable, [sys.executable, '-X', 'utf8', *sys.orig_argv[1:]])"
    assert found == [f"agent/scheduled_events_agent/cli/__init__.py: {again}"]

    shells: dict[str, set[str]] = {}
    for file, node in nodes(ast.Constant):
        assert isinstance(node, ast.Constant)
        if isinstance(node.value, str) and (match := _SHELL.search(node.value)) and "\n" not in node.value:
            shells.setdefault(file, set()).add(node.value if node.value.startswith("/") else match[2])
    assert shells == SHELLS


def test_nothing_evaluates_text_or_builds_objects_from_it() -> None:
    found = [f"{file}:{call.lineno}: {name}" for file, name, call in calls() if EVALUATORS.fullmatch(name)]
    assert found == []
    # Trees of nodes without a meaning, by the loader that knows no Python objects.
    loaders = {ast.unparse(call) for _, name, call in calls() if name.startswith("yaml.") and "Node" not in name}
    assert {text for text in loaders if "Loader" in text or "load" in text} == {"yaml.compose(text, _Loader)"}
    assert yaml_nodes._Loader.__mro__[1] in (getattr(yaml, "CSafeLoader", yaml.SafeLoader), yaml.SafeLoader)


def test_no_module_is_used_that_executes_its_input_or_follows_redirects() -> None:
    found = set()
    for file, node in [*nodes(ast.Import), *nodes(ast.ImportFrom)]:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found |= {
            f"{file}: {name}" for name in names for bad in UNSAFE_MODULES if f"{name}.".startswith(f"{bad}.")
        }
    assert found == set()


@pytest.mark.parametrize("file", ["packaging/requirements.txt", "packaging/windows/requirements.txt"])
def test_everything_that_is_shipped_is_pinned_by_hash(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    entries = [line for line in text.replace("\\\n", " ").splitlines() if not line.startswith("#")]
    assert [
        line for line in entries if not re.fullmatch(r"[\w-]+==\S+( +--hash=sha256:[0-9a-f]{64})+ *", line)
    ] == []
    assert len(entries) > 5
