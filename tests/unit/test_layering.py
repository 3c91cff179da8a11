"""Allowed imports: they point downwards only, and differences between systems stay in host/."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import scheduled_events_agent

ROOT = Path(scheduled_events_agent.__file__).parent
# Modules and folders that read no clock, file or socket.
PURE = {
    "hooks.durations", "imds.api_version", "imds.compare", "imds.document", "imds.endpoint", "imds.text",
    "kubernetes.conditions", "policy", "status", "telemetry.log_ids", "workflow",
}  # fmt: skip

# Folder -> the folders that its modules may import. No two of them import each other.
ALLOWED: dict[str, set[str]] = {
    "__init__": set(),
    "__main__": {"cli"},
    "host": set(),
    "http": set(),
    "imds": {"host", "http"},
    "policy": {"imds"},
    "workflow": {"imds", "policy"},
    "status": {"imds", "policy", "workflow"},
    "telemetry": {"host", "http", "imds", "policy", "status", "workflow"},
    "hooks": {"host", "imds", "policy", "web", "workflow"},
    "store": {"host", "status", "workflow"},
    "notifications": {"host", "http", "imds", "policy", "status", "workflow"},
    "fleet": {"host", "http", "imds", "policy", "workflow"},
    "kubernetes": {"fleet", "host", "http", "imds", "notifications", "policy", "status", "workflow"},
    "web": {"engine", "host", "policy", "status", "store", "telemetry", "workflow"},
    "engine": {"hooks", "host", "imds", "notifications", "policy", "status", "store", "telemetry", "workflow"},
    "daemon": {
        "engine", "fleet", "hooks", "host", "http", "imds", "kubernetes", "notifications", "policy", "status",
        "store", "telemetry", "web", "workflow",
    },
    "simulator": {"host", "imds", "policy", "status", "store"},
    "cli": {
        "daemon", "fleet", "hooks", "host", "http", "imds", "kubernetes", "notifications", "policy", "simulator",
        "status", "store", "telemetry", "workflow",
    },
}  # fmt: skip
# What these modules of a folder may not import, though the folder may.
FORBIDDEN: dict[str, set[str]] = {
    "store": {"status.messages", "status.actions", "status.attention", "status.events"},
    "web": {"engine.engine"},
    "daemon.poller": {"engine.engine"},
    "daemon.executor": {"engine.engine"},
    "daemon.status_source": {"engine.engine"},
    "hooks.preflight": {"web.server", "web.endpoints"},
    "telemetry.metrics": {"http.transport", "http.retry"},
}
# Nothing that reads a clock, a file or a socket, or starts anything.
IMPURE = {
    "asyncio", "concurrent", "ctypes", "glob", "http", "httpx", "io", "logging", "multiprocessing", "os",
    "pathlib", "prometheus_client", "psutil", "queue", "random", "select", "selectors", "shutil", "signal",
    "socket", "sqlite3", "ssl", "structlog", "subprocess", "sys", "tempfile", "threading", "time", "urllib",
    "uuid", "yaml",
}  # fmt: skip
OF_ONE_SYSTEM = {
    "_winapi", "crypt", "fcntl", "grp", "msvcrt", "nt", "ntsecuritycon", "posix", "pty", "pwd", "pythoncom",
    "pywintypes", "resource", "servicemanager", "spwd", "syslog", "termios", "win32api", "win32con", "win32event",
    "win32evtlog", "win32evtlogutil", "win32file", "win32job", "win32net", "win32pipe", "win32process",
    "win32security", "win32service", "win32serviceutil", "win32ts", "winerror", "winreg",
}  # fmt: skip
# Modules that an idle agent need not have in memory; each is imported where it is used.
HEAVY = {
    "asyncio", "concurrent", "ctypes", "difflib", "email.message", "logging.handlers", "multiprocessing",
    "urllib.request", "zoneinfo",
}  # fmt: skip
# Loaded by an agent that runs; the command line and the simulator are other programs.
RESIDENT = ALLOWED.keys() - {"simulator", "cli", "__init__", "__main__"}
SERVERS = {"http.server", "socketserver"}


def module_of(path: Path) -> str:
    """The folder of a module, or the module itself if it is in none."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    """The module's name below the package; that of the folder for its __init__."""
    name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    return name if name == "__init__" else name.removesuffix(".__init__")


def files(*modules: str) -> list[Path]:
    """All modules; or those, and those below them."""
    found = sorted(ROOT.rglob("*.py"))
    return [path for path in found if not modules or is_in(dotted(path), set(modules))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT.parent).as_posix()


def dotted_name_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").replace("/", ".")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def at_start(tree: ast.Module) -> Iterator[ast.AST]:
    """The statements that run when the module is imported."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        yield node
        if is_for_types_only(node):
            todo.extend(node.orelse)  # type: ignore[attr-defined]
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo.extend(ast.iter_child_nodes(node))


@cache
def imports(path: Path, *, only_at_start: bool = False) -> set[str]:
    """Full names of all that the file imports; ``from a import b`` gives a and a.b."""
    tree = parse(path)
    package = path.relative_to(ROOT.parent).parent.parts
    names: set[str] = set()
    for node in at_start(tree) if only_at_start else ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join([*above, *filter(None, [node.module])])
            names.update({origin, *(f"{origin}.{alias.name}" for alias in node.names)})
    return names


def is_in(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def imported_by(path: Path) -> set[str]:
    """The modules of the package that the file imports anywhere, by their names below it."""
    known = {dotted(other) for other in files()} - {"__init__"}
    below = {name.partition(".")[2] for name in imports(path) if name.startswith("scheduled_events_agent.")}
    found = {name for name in below if name in known}
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)} - {dotted(path)}


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_a_module_imports_only_what_lies_below_it(path: Path) -> None:
    folder = module_of(path)
    assert folder in ALLOWED, f"{name_of(path)}: a new folder needs a place in the order of the layers"
    assert {name.partition(".")[0] for name in imported_by(path)} - ALLOWED[folder] - {folder} == set()
    forbidden = [names for module, names in FORBIDDEN.items() if is_in(dotted(path), {module})]
    assert imported_by(path) & set().union(*forbidden) == set()


def test_no_two_folders_import_each_other() -> None:
    pairs = {(folder, other) for folder, others in ALLOWED.items() for other in others}
    assert {(one, other) for one, other in pairs if (other, one) in pairs} == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    waiting = {dotted(path): imported_by(path) for path in files()}
    while free := {name for name, others in waiting.items() if not others & waiting.keys()}:
        for name in free:
            del waiting[name]
    assert waiting == {}


def test_no_module_lies_loose_in_the_package() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert [path.name for path in ROOT.iterdir() if path.is_dir() and not (path / "__init__.py").is_file()] in (
        [],
        ["__pycache__"],
    )


@pytest.mark.parametrize("path", files(*PURE), ids=name_of)
def test_a_pure_module_does_no_input_or_output_and_reads_no_clock(path: Path) -> None:
    may_name = {"pathlib", "pathlib.PurePath", "pathlib.PurePosixPath", "pathlib.PureWindowsPath"}
    may_name |= {name for name in imports(path) if is_in(name, {"yaml"})}
    assert {name for name in imports(path) if is_in(name, IMPURE)} - may_name == set()
    # Not on a clock, but datetime has one too.
    calls = [node for node in ast.walk(parse(path)) if isinstance(node, ast.Call)]
    names = {node.func.attr for node in calls if isinstance(node.func, ast.Attribute)}
    names |= {node.func.id for node in calls if isinstance(node.func, ast.Name)}
    assert names & {"now", "utcnow", "today", "open", "print", "input"} == set()


@pytest.mark.parametrize("path", [path for path in files() if module_of(path) != "host"], ids=name_of)
def test_only_the_host_modules_know_which_system_they_run_on(path: Path) -> None:
    assert {name for name in imports(path) if is_in(name, OF_ONE_SYSTEM | {"platform"})} == set()
    attributes = {ast.unparse(node) for node in ast.walk(parse(path)) if isinstance(node, ast.Attribute)}
    assert attributes & {"sys.platform", "os.name", "os.uname", "sys.getwindowsversion"} == set()


@pytest.mark.parametrize("path", files(*RESIDENT), ids=name_of)
def test_importing_the_agent_loads_nothing_heavy(path: Path) -> None:
    heavy = HEAVY if module_of(path) == "web" else HEAVY | SERVERS
    assert {name for name in imports(path, only_at_start=True) if is_in(name, heavy)} == set()


@pytest.mark.parametrize("path", files(*RESIDENT), ids=name_of)
def test_a_running_agent_describes_no_type_to_msgspec_at_first_use(path: Path) -> None:
    """Two threads that do so at the same moment crash the process. A module makes its Decoder at import."""
    calls = [ast.unparse(node) for node in ast.walk(parse(path)) if isinstance(node, ast.Call)]
    decoding = [call for call in calls if call.startswith("msgspec.json.decode(") and "type=" in call]
    assert [call for call in decoding if "type=msgspec.Raw" not in call] == []  # which describes nothing


@pytest.mark.skipif(sys.platform == "win32", reason="an installer stops the agent first")
def test_a_running_agent_has_loaded_all_of_its_modules() -> None:
    program = "import sys, scheduled_events_agent.cli.run, scheduled_events_agent.daemon; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    here = {path for path in files(*RESIDENT) if "windows" not in path.name}
    wanted = {name for path in here for name in imports(path) if "windows" not in name}
    # It is loaded at the start too, if the policy has it.
    wanted = {
        name
        for name in wanted
        if not is_in(
            name,
            {f"scheduled_events_agent.{one}" for one in ("fleet", "daemon.fleet", "kubernetes", "daemon.node")},
        )
    }
    assert (wanted & {dotted_name_of(path) for path in files()}) - set(loaded) == set()
    assert [name for name in loaded if name.startswith("scheduled_events_agent.kubernetes")] == []


def test_a_running_agent_has_loaded_no_dataclass_and_compiled_no_pattern() -> None:
    """Every start would wait for them.

    A Struct takes a tenth of the time of a dataclass. A pattern is text: ``re`` compiles it at its first use, and
    keeps it; a usual start uses one of four.
    """
    program = (
        "import dataclasses, re, sys, scheduled_events_agent.cli.run\n"
        "own = [module for name, module in sys.modules.items() if name.startswith('scheduled_events_agent')]\n"
        "print(len(own), *{value for module in own for value in vars(module).values()"
        " if isinstance(value, re.Pattern) or isinstance(value, type) and dataclasses.is_dataclass(value)})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    count, *found = done.stdout.split(maxsplit=1)
    assert int(count) > 50
    assert found == []


def test_an_agent_that_need_not_tell_a_cluster_loads_nothing_of_it(tmp_path: Path) -> None:
    here = "imds: {endpoint: 'http://127.0.0.1:9'}\nagent: {listen: 'off'}"
    (tmp_path / "policy.yaml").write_text(f"{here}\nnotify: [{{name: chat, to: 'http://127.0.0.1:9/'}}]")
    program = (
        "import sys, threading, scheduled_events_agent.cli.run as run\n"
        "with run.open_daemon(config='policy.yaml', state_dir='state', is_observing=True, stop_timeout=1,"
        " set_up_log=lambda *_: None) as daemon:\n"
        "    threading.Timer(0.5, daemon.stop).start()\n"
        "    daemon.run()\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    *_, names = done.stdout.splitlines()  # after the log
    assert "scheduled_events_agent.daemon.notifier" in names.split()
    cluster = {"scheduled_events_agent.kubernetes", "scheduled_events_agent.daemon.node"}
    assert {name for name in names.split() if is_in(name, cluster)} == set()


@pytest.mark.parametrize("module", ["completion", "history", "operator", "status"])
def test_a_command_that_only_reads_the_state_loads_little(module: str) -> None:
    slow = {"asyncio", "httpx", "prometheus_client", "structlog", "yaml"}
    if sys.platform != "win32":  # which asks psutil for the boot's time, and hashlib for the service's account
        slow |= {"hashlib", "psutil", "subprocess"}
    command = [sys.executable, "-c", f"import sys, scheduled_events_agent.cli.{module}; print(*sys.modules)"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert slow & set(loaded) == set()


def test_a_check_loads_neither_http_nor_tls_unless_the_policy_has_them(tmp_path: Path) -> None:
    config = tmp_path / "policy.yaml"
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "scheduled_events_agent",
        "check",
        "--config",
        str(config),
    ]
    slow = {"asyncio", "httpx", "prometheus_client", "ssl", "structlog"}
    for policy, is_with_http in (
        ("rules: [{name: all, approve: never}]", False),
        ("notify: [{name: chat, to: 'https://127.0.0.1/'}]", True),
    ):
        config.write_text(policy)
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        loaded = {line.rpartition("|")[2].strip() for line in told.splitlines()}
        assert "scheduled_events_agent.policy.load" in loaded
        assert ({"httpx", "ssl"} <= loaded) == is_with_http
        assert is_with_http or slow & loaded == set()


def test_explain_loads_the_simulator_only_for_a_scenario(tmp_path: Path) -> None:
    (tmp_path / "document.json").write_text('{"DocumentIncarnation": 1, "Events": []}')
    (tmp_path / "policy.yaml").write_text("")
    command = [sys.executable, "-X", "importtime", "-m", "scheduled_events_agent", "explain"]
    for what, has_simulator in (("document.json", False), ("spot-eviction", True)):
        words = [*command, what, "--config", "policy.yaml"]
        told = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stderr
        loaded = {line.rpartition("|")[2].strip() for line in told.splitlines()}
        assert "scheduled_events_agent.workflow" in loaded
        assert any(is_in(name, {"scheduled_events_agent.simulator"}) for name in loaded) == has_simulator
        assert "httpx" not in loaded


MAIN_LOOP = {"scheduled_events_agent/daemon/daemon.py", "scheduled_events_agent/daemon/inbox.py"}


@pytest.mark.parametrize("path", files("daemon", "web"), ids=name_of)
def test_only_the_main_loop_holds_the_engine(path: Path) -> None:
    engine = {"scheduled_events_agent.engine.engine", "scheduled_events_agent.engine.Engine"}
    knows_it = any(is_in(name, engine) for name in imports(path))
    assert knows_it == (name_of(path) in MAIN_LOOP)


def test_the_store_imports_only_the_types_of_the_status() -> None:
    status = "scheduled_events_agent.status"
    known = {name for path in files("store") for name in imports(path) if is_in(name, {status})}
    assert known
    assert {name for name in known if not is_in(name, {f"{status}.status", f"{status}.facts"})} == set()


def test_only_the_pytest_plugin_imports_pytest_and_no_module_imports_the_plugin() -> None:
    plugin = "scheduled_events_agent.simulator.testing"
    knowing = {name_of(path) for path in files() if any(is_in(name, {"pytest", plugin}) for name in imports(path))}
    assert knowing == {"scheduled_events_agent/simulator/testing.py"}


@pytest.mark.parametrize("path", [path for path in files("host") if path.parent.name != "linux"], ids=name_of)
def test_a_host_module_can_be_imported_on_the_other_system(path: Path) -> None:
    found = {name for name in imports(path, only_at_start=True) if is_in(name, OF_ONE_SYSTEM)}
    assert found == set()


def test_no_module_imports_the_source_folder_as_a_package() -> None:
    assert [name_of(path) for path in files() if any(is_in(name, {"agent"}) for name in imports(path))] == []


def test_every_module_states_its_purpose() -> None:
    assert [name_of(path) for path in files() if not ast.get_docstring(parse(path))] == []


def test_the_map_in_the_package_names_every_folder() -> None:
    listed = scheduled_events_agent.__doc__ or ""
    folders = {f"{path.name}/" for path in ROOT.iterdir() if (path / "__init__.py").is_file()}
    assert sorted(folder for folder in folders if f"    {folder}" not in listed) == []


@pytest.mark.parametrize("path", [path for path in ROOT.iterdir() if (path / "__init__.py").is_file()], ids=str)
def test_a_folder_says_what_is_where(path: Path) -> None:
    listed = ast.get_docstring(parse(path / "__init__.py")) or ""
    modules = {module.name for module in path.glob("*.py")} - {"__init__.py"}
    assert (
        path.name in ("cli", "simulator", "host") or sorted(name for name in modules if name not in listed) == []
    )


def test_the_walk_sees_imports_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "scheduled_events_agent"
    package.mkdir()
    (package / "edge.py").write_text("")
    (package / "module.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "import os.path\n"
        "from . import edge\n"
        "if TYPE_CHECKING:\n    import yaml\n"
        "def later():\n    from scheduled_events_agent.edge import thing\n    import ctypes\n"
        "class Early:\n    import zoneinfo\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", package)
    path = package / "module.py"
    assert imported_by(path) == {"edge"}
    assert {"os.path", "yaml", "ctypes", "zoneinfo", "scheduled_events_agent.edge.thing"} <= imports(path)
    assert {name for name in imports(path, only_at_start=True) if is_in(name, HEAVY)} == {"zoneinfo"}
    assert is_in("os.path", IMPURE)
