"""The files of ``install-unit``: what is written, from where, what is refused.

It runs as root on real files, in a mount namespace of its own where systemd does not run.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent import __version__, host
from agent.host import processes, systemd_unit
from agent.host.systemd_unit import RULE_FILE, STRICT_FILE, UNIT_FILE, Place, UnitError
from agent.host.windows import system as windows

CHECKOUT = Path(__file__).resolve().parents[2]
PROGRAM = Path("/opt/agent/bin/scheduled-events-agent")
PLACE = Place(PROGRAM, CHECKOUT / "systemd", CHECKOUT / "config" / "policy.yaml", code=(), is_packaged=False)
PACKAGED = PLACE._replace(program=Path("/usr/bin/scheduled-events-agent"), is_packaged=True)
RULE = (CHECKOUT / "systemd" / "polkit.rules").read_text(encoding="utf-8")
SHIPPED = (CHECKOUT / "systemd" / "scheduled-events-agent.service").read_text(encoding="utf-8")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="systemd is Linux's")


def _has_root_and_systemctl() -> bool:
    if sys.platform == "win32" or os.geteuid() != 0:
        return False
    try:
        processes.find_systemctl()
    except host.HostError:
        return False
    return True


at_rest = pytest.mark.skipif(not _has_root_and_systemctl(), reason="an installation needs root and a systemctl")


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "agent", "install-unit", *arguments],
        cwd=CHECKOUT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def refusal(error: "pytest.ExceptionInfo[UnitError]") -> str:
    return f"{error.value.kind}: {error.value}"


# --- the texts


def test_the_unit_runs_the_program_at_its_place_and_is_otherwise_as_shipped() -> None:
    text = systemd_unit.unit_text(SHIPPED, PROGRAM)
    changed = [
        (before, after)
        for before, after in zip(SHIPPED.splitlines(), text.splitlines(), strict=True)
        if before != after
    ]
    assert changed == [
        (before, before.replace("/usr/bin/scheduled-events-agent", str(PROGRAM)))
        for before in SHIPPED.splitlines()
        if before.startswith("Exec") and "/usr/bin/scheduled-events-agent" in before
    ]
    assert [after.partition("=")[0] for _, after in changed] == ["ExecStart", "ExecReload"]


@pytest.mark.parametrize(
    "folder", ["/opt/my agent", "/opt/50%", "/opt/$HOME", '/opt/"x"', "/opt/it's", "/opt/a\\b"]
)
def test_a_path_that_systemd_would_read_otherwise_is_refused(folder: str) -> None:
    program = Path(folder, "scheduled-events-agent")
    with pytest.raises(UnitError) as caught:
        systemd_unit.unit_text(SHIPPED, program)
    assert refusal(caught) == (
        f"place: {program}: expected a path of ASCII letters, digits and /._+@,:=~- only, which systemd and "
        "shells read as it stands; install the agent under another one, such as /opt/scheduled-events-agent"
    )


def test_the_polkit_rule_names_exactly_the_units_of_the_policy_once_each() -> None:
    text = systemd_unit.polkit_rule(
        RULE, ["fill-web.service", "drain@web.service", "fill-web.service", r"a\x2db.service"]
    )
    listed = text[text.index("[") : text.index("]") + 1]
    assert json.loads(listed) == [r"a\x2db.service", "drain@web.service", "fill-web.service"]
    assert text.replace(text[text.index("[") : text.index("]") + 1], "[]") == RULE


def test_the_account_is_the_one_that_packages_make() -> None:
    packaged = (CHECKOUT / "packaging" / "sysusers.conf").read_text(encoding="utf-8").splitlines()
    line = f'u {systemd_unit.USER} - "Azure Scheduled Events agent" {systemd_unit.STATE}'
    assert [line for line in packaged if not line.startswith("#")] == [line]


def test_each_set_up_has_its_files_and_rules_out_those_of_the_other() -> None:
    def files(place: Place, *units: str, is_strict: bool) -> dict[Path, bool]:
        found = systemd_unit.files_of(place, units, is_strict=is_strict)
        return {path: text is not None for path, text in found.items()}

    unit = "drain.service"
    assert files(PLACE, unit, is_strict=False) == {UNIT_FILE: True, STRICT_FILE: False, RULE_FILE: False}
    assert files(PLACE, unit, is_strict=True) == {UNIT_FILE: True, STRICT_FILE: True, RULE_FILE: True}
    assert files(PLACE, is_strict=True) == {UNIT_FILE: True, STRICT_FILE: True, RULE_FILE: False}
    assert files(PACKAGED, unit, is_strict=True) == {STRICT_FILE: True, RULE_FILE: True}
    assert files(PACKAGED, unit, is_strict=False) == {STRICT_FILE: False, RULE_FILE: False}


# --- where a service may come from


def test_the_place_of_this_program_has_every_folder_that_its_modules_come_from() -> None:
    place = systemd_unit.find_place()
    assert place.program == Path(sys.executable).with_name("scheduled-events-agent")
    assert (place.systemd, place.policy) == (PLACE.systemd, PLACE.policy)
    assert not place.is_packaged
    for module in (json, pytest, systemd_unit):
        assert module.__file__ is not None
        assert any(Path(module.__file__).is_relative_to(folder) for folder in place.code), module


def place_of(path: Path) -> Place:
    return PLACE._replace(code=(path,))


WAY_OUT = (
    "; a system service must be installed where only root can write: with pipx install --global, or in a venv "
    "that root makes under /opt (python3 -m venv /opt/scheduled-events-agent)"
)


def test_what_lies_in_a_folder_for_temporary_files_is_refused() -> None:
    with pytest.raises(UnitError) as caught:
        systemd_unit.check_place(place_of(Path("/tmp/agent/bin/python")))
    assert refusal(caught) == f"place: /tmp is for temporary files{WAY_OUT}"


@at_rest
@pytest.mark.parametrize(("mode", "owner"), [(0o755, 1000), (0o777, 0), (0o757, 0)])
@pytest.mark.parametrize("through", ["path", "link"])
def test_whatever_others_than_root_can_change_is_refused(
    own_folder: Path, mode: int, owner: int, through: str
) -> None:
    weak = own_folder / "weak"
    (weak / "bin").mkdir(parents=True)
    (weak / "bin" / "python").touch()
    (own_folder / "link").symlink_to(weak / "bin" / "python")
    place = place_of(own_folder / "link" if through == "link" else weak / "bin" / "python")
    systemd_unit.check_place(place)
    weak.chmod(mode)
    shutil.chown(weak, owner, 0)
    with pytest.raises(UnitError) as caught:
        systemd_unit.check_place(place)
    who, way_out = ("its owner, uid 1000", "chown root") if owner else ("every account", "chmod go-w")
    told = f"{weak} can be changed by {who}, and the agent acts on what it finds there: {way_out} {weak}"
    assert refusal(caught) == f"place: {told}{WAY_OUT}"


@at_rest
@pytest.mark.parametrize(
    ("mode", "owners", "fault"),
    [
        (0o755, (1000, 0), "belongs to uid 1000"),
        (0o775, (0, 1000), "can be changed by the group 1000"),
        (0o757, (0, 0), "can be changed by every account"),
    ],
)
@pytest.mark.parametrize("what", ["folder", "file", "library"])
def test_whatever_others_can_change_in_a_venv_is_refused(
    own_folder: Path, mode: int, owners: tuple[int, int], fault: str, what: str
) -> None:
    packages = own_folder / "lib" / "site-packages"
    (packages / "httpx").mkdir(parents=True)
    (packages / "httpx" / "__init__.py").touch()
    (packages / "speedups.so").touch()
    (own_folder / "python").symlink_to(sys.executable)
    place = PLACE._replace(code=tuple(own_folder.rglob("*")))
    systemd_unit.check_place(place)
    names = {"folder": "httpx", "file": "httpx/__init__.py", "library": "speedups.so"}
    weak = packages / names[what]
    weak.chmod(mode)
    shutil.chown(weak, *owners)
    with pytest.raises(UnitError) as caught:
        systemd_unit.check_place(place)
    assert refusal(caught).startswith(f"place: {weak} {fault}")
    assert refusal(caught).endswith(WAY_OUT)


@at_rest
def test_code_of_an_account_that_also_owns_the_agent_is_refused(own_folder: Path) -> None:
    (own_folder / "python").touch()
    shutil.chown(own_folder / "python", 1000, 0)
    with pytest.raises(UnitError) as caught:
        systemd_unit.check_place(place_of(own_folder / "python"))
    assert refusal(caught) == f"place: {own_folder}/python belongs to uid 1000{WAY_OUT}"


@pytest.fixture
def own_folder() -> Iterator[Path]:
    """A folder that only root can write, and above which only root can: /tmp is none."""
    folder = Path("/opt", f"scheduled-events-agent-test-{os.getpid()}")
    folder.mkdir(mode=0o755)
    yield folder
    shutil.rmtree(folder)


# --- a system that is not booted

# Runs in a mount namespace of its own, so that nothing of the machine is changed.
_DRIVER = """
import json, sys
from pathlib import Path
from agent.host import systemd_unit
name, place, arguments = json.loads(sys.argv[1])
place = systemd_unit.Place(*map(Path, place[:3]), code=(), is_packaged=place[4])
try:
    said = getattr(systemd_unit, name)(place, **arguments)
except systemd_unit.UnitError as error:
    said = f"{error.kind}: {error}"
print(json.dumps(said))
"""
_BOUND = ("etc", "var/lib", "usr/lib/systemd/system", "usr/share/dbus-1/system-services")


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """The root directory of a system that does not run."""
    root = tmp_path / "system"
    for folder in _BOUND:
        (root / folder).mkdir(parents=True)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\n")
    return root


def ask(root: Path, name: str, place: Place = PLACE, **arguments: object) -> "list[str] | str":
    """Call a function of systemd_unit in the system; returns what it did, or why it refused."""
    binds = " && ".join(
        f"mount --bind {root}/{folder} /{folder}" for folder in _BOUND if Path("/", folder).is_dir()
    )
    hide = "if [ -d /run/systemd ]; then mount -t tmpfs none /run/systemd; fi"
    task = json.dumps([name, [*map(str, place[:3]), [], place.is_packaged], arguments])
    isolated = ("unshare", "--mount", "--propagation=private", "sh", "-c", f'{binds} && {hide} && exec "$@"', "sh")
    done = subprocess.run(
        [*isolated, sys.executable, "-c", _DRIVER, task],
        cwd=CHECKOUT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: list[str] | str = json.loads(done.stdout)
    return said


def install(root: Path, *units: str, is_strict: bool = False, place: Place = PLACE) -> "list[str] | str":
    return ask(root, "install", place, units=units, is_strict=is_strict, is_now=False)


def remove(root: Path, place: Place = PLACE) -> "list[str] | str":
    return ask(root, "remove", place)


def text_of(root: Path, path: Path) -> str:
    return (root / path.relative_to("/")).read_text(encoding="utf-8")


AT_BOOT = [
    "enabled the agent: it starts at boot",
    "the agent does not run until the next boot, or until: systemctl restart scheduled-events-agent",
]


NO_POLKIT = "there is no polkit here: hooks that are units cannot start before it is installed"


@at_rest
def test_an_installation_is_complete_and_the_second_one_changes_nothing(
    system: Path,
) -> None:
    assert install(system) == [
        "wrote /etc/scheduled-events-agent/policy.yaml",
        f"wrote {UNIT_FILE}",
        *AT_BOOT,
    ]
    assert text_of(system, UNIT_FILE) == systemd_unit.marked(systemd_unit.unit_text(SHIPPED, PROGRAM))
    etc = system / "etc/scheduled-events-agent"
    modes = [
        path.stat().st_mode & 0o7777 for path in (etc, etc / "hooks", etc / "credentials", etc / "policy.yaml")
    ]
    assert modes == [0o755, 0o755, 0o700, 0o644]
    wanted = system / "etc/systemd/system/multi-user.target.wants/scheduled-events-agent.service"
    assert wanted.readlink() == UNIT_FILE
    assert install(system) == []


@at_rest
def test_whatever_the_umask_polkit_can_read_the_rule_and_everybody_the_policy(system: Path) -> None:
    before = os.umask(0o077)
    try:
        install(system, "drain.service", is_strict=True)
    finally:
        os.umask(before)
    assert {
        str(path.relative_to(system)): path.stat().st_mode & 0o7777
        for file in (RULE_FILE, STRICT_FILE, UNIT_FILE, Path("/etc/scheduled-events-agent/policy.yaml"))
        for path in (system / file.relative_to("/"), *(system / file.relative_to("/")).parents)
        if path.is_relative_to(system / "etc") and path != system / "etc"
    } == {
        "etc/polkit-1": 0o755,
        "etc/polkit-1/rules.d": 0o755,
        "etc/polkit-1/rules.d/50-scheduled-events-agent.rules": 0o644,
        "etc/systemd": 0o755,
        "etc/systemd/system": 0o755,
        "etc/systemd/system/scheduled-events-agent.service": 0o644,
        "etc/systemd/system/scheduled-events-agent.service.d": 0o755,
        "etc/systemd/system/scheduled-events-agent.service.d/50-strict.conf": 0o644,
        "etc/scheduled-events-agent": 0o755,
        "etc/scheduled-events-agent/policy.yaml": 0o644,
    }


@at_rest
def test_a_policy_that_is_there_is_the_operators(system: Path) -> None:
    policy = system / "etc/scheduled-events-agent/policy.yaml"
    policy.parent.mkdir()
    policy.write_text("rules: []\n")
    assert "wrote /etc/scheduled-events-agent/policy.yaml" not in install(system)
    assert policy.read_text() == "rules: []\n"


@at_rest
@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_a_file_that_install_unit_did_not_write_is_neither_replaced_nor_removed(system: Path, kind: str) -> None:
    unit = system / UNIT_FILE.relative_to("/")
    unit.parent.mkdir(parents=True)
    if kind == "file":
        unit.write_text("[Service]\nExecStart=/bin/true\n")
    elif kind == "directory":
        unit.mkdir()
    else:
        unit.symlink_to("nowhere")
    message = f"file: {UNIT_FILE}: not written by install-unit: move it away, then run this again"
    assert install(system, is_strict=True) == message
    assert remove(system) == message
    assert not (system / STRICT_FILE.relative_to("/")).exists()
    assert kind != "file" or unit.read_text() == "[Service]\nExecStart=/bin/true\n"


@at_rest
def test_a_unit_that_install_unit_wrote_is_as_shipped_again_and_says_so(system: Path) -> None:
    install(system)
    unit = system / UNIT_FILE.relative_to("/")
    assert "edits here are lost" in unit.read_text().splitlines()[0]
    unit.write_text(unit.read_text().replace("RestartSec=5s", "RestartSec=7s"))
    assert install(system)[0] == f"wrote {UNIT_FILE}"
    assert "RestartSec=5s" in unit.read_text()


@at_rest
def test_a_unit_of_another_version_of_the_agent_is_written_anew(system: Path) -> None:
    install(system)
    unit = system / UNIT_FILE.relative_to("/")
    unit.write_text(unit.read_text().replace(f"version {__version__}", "version 0.0.1"))
    assert install(system)[0] == f"wrote {UNIT_FILE}"


@at_rest
def test_a_program_that_the_strict_account_cannot_run_is_refused(system: Path, tmp_path: Path) -> None:
    program = tmp_path / "venv" / "bin" / "scheduled-events-agent"
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    program.parent.chmod(0o700)
    said = install(system, is_strict=True, place=PLACE._replace(program=program))
    assert isinstance(said, str)
    beginning = f"place: {program}: scheduled-events-agent cannot pass through "
    assert said.startswith(beginning)
    # pytest's own directory is private, too.
    assert Path(said.removeprefix(beginning).partition(":")[0]) in program.parents
    assert "chmod o+rX the directories there" in said
    assert not (system / UNIT_FILE.relative_to("/")).exists()


@at_rest
def test_the_strict_set_up_comes_and_goes_with_its_account_and_its_rule(system: Path) -> None:
    assert install(system, "drain.service", is_strict=True) == [
        "made the account scheduled-events-agent",
        "wrote /etc/scheduled-events-agent/policy.yaml",
        f"wrote {UNIT_FILE}",
        f"wrote {STRICT_FILE}",
        f"wrote {RULE_FILE}",
        *AT_BOOT,
        NO_POLKIT,
    ]
    strict = (CHECKOUT / "systemd" / "strict.conf").read_text(encoding="utf-8")
    assert text_of(system, STRICT_FILE) == systemd_unit.marked(strict)
    rule = systemd_unit.polkit_rule(RULE, ["drain.service"])
    assert text_of(system, RULE_FILE) == systemd_unit.marked(rule, comment="//")
    account = [line.split(":") for line in (system / "etc/passwd").read_text().splitlines()][-1]
    assert account[0] == "scheduled-events-agent"
    assert account[4:] == ["Azure Scheduled Events agent", "/var/lib/scheduled-events-agent", "/usr/sbin/nologin"]
    assert install(system, "drain.service", is_strict=True) == [NO_POLKIT]
    after = "the agent does not run until the next boot, or until: systemctl restart scheduled-events-agent"
    assert install(system, "drain.service", "fill.service", is_strict=True) == [
        f"wrote {RULE_FILE}",
        after,
        NO_POLKIT,
    ]
    assert install(system, is_strict=True) == [f"removed {RULE_FILE}", after]
    assert install(system) == [f"removed {STRICT_FILE}", after]
    assert not (system / STRICT_FILE.relative_to("/")).parent.exists()


@at_rest
def test_the_strict_set_up_refuses_a_program_that_it_does_not_see(system: Path) -> None:
    program = Path("/root/agent/bin/scheduled-events-agent")
    place = PLACE._replace(program=program)
    assert install(system, is_strict=True, place=place) == (
        f"place: {program}: the strict set-up cannot see it; install the agent with pipx install --global, "
        "or in /opt/scheduled-events-agent, or without --strict"
    )
    assert sorted(path.name for path in (system / "etc").iterdir()) == ["group", "passwd"]
    assert isinstance(install(system, place=place), list)


@at_rest
def test_a_rule_that_no_polkit_will_read_is_noticed(system: Path) -> None:
    assert NO_POLKIT not in install(system, is_strict=True)
    assert install(system, "drain.service", is_strict=True)[-1] == NO_POLKIT
    assert install(system, "drain.service", is_strict=True) == [NO_POLKIT]
    polkit = system / "usr/share/dbus-1/system-services/org.freedesktop.PolicyKit1.service"
    polkit.touch()
    assert install(system, "drain.service", is_strict=True) == []


@at_rest
def test_a_file_that_cannot_be_written_whole_leaves_the_old_one(system: Path) -> None:
    install(system)
    unit = system / UNIT_FILE.relative_to("/")
    unit.write_text(unit.read_text().replace("RestartSec=5s", "RestartSec=7s"))
    before = unit.read_text()
    (unit.parent / f".{unit.name}.new").mkdir()  # nothing can be written there
    with pytest.raises(AssertionError, match="IsADirectoryError"):
        install(system)
    assert unit.read_text() == before


@at_rest
def test_a_removal_leaves_nothing_of_the_installation_but_the_operators_files(system: Path) -> None:
    install(system, "drain.service", is_strict=True)
    assert remove(system) == [
        "disabled the agent",
        f"removed {RULE_FILE}",
        f"removed {STRICT_FILE}",
        f"removed {UNIT_FILE}",
    ]
    left = [str(path.relative_to(system)) for path in sorted((system / "etc").rglob("*")) if not path.is_dir()]
    assert [name for name in left if "scheduled-events-agent" in name] == [
        "etc/scheduled-events-agent/policy.yaml"
    ]
    assert remove(system) == []


@at_rest
def test_a_packaged_agent_keeps_its_unit_and_a_second_agent_is_refused(system: Path) -> None:
    packaged = system / "usr/lib/systemd/system/scheduled-events-agent.service"
    packaged.write_text(SHIPPED)
    done = install(system, "drain.service", is_strict=True, place=PACKAGED)
    after = "the agent does not run until the next boot, or until: systemctl restart scheduled-events-agent"
    assert done == [
        "made the account scheduled-events-agent", f"wrote {STRICT_FILE}", f"wrote {RULE_FILE}", after, NO_POLKIT,
    ]  # fmt: skip
    assert remove(system, PACKAGED) == [
        f"removed {RULE_FILE}",
        f"removed {STRICT_FILE}",
    ]
    assert install(system) == (
        "place: /usr/lib/systemd/system/scheduled-events-agent.service: a package brought this unit; run "
        "/usr/bin/scheduled-events-agent install-unit, the package's own, or remove the package first"
    )
    assert not (system / "etc/scheduled-events-agent").exists()


@at_rest
def test_an_agent_that_is_masked_stays_so(system: Path) -> None:
    assert install(system) != []
    unit = system / UNIT_FILE.relative_to("/")
    unit.unlink()
    unit.symlink_to("/dev/null")  # as systemctl mask does
    told = f"file: {UNIT_FILE}: not written by install-unit: move it away, then run this again"
    assert install(system) == told
    assert unit.is_symlink()


# --- the command


def test_on_windows_the_command_names_the_way() -> None:
    with pytest.raises(host.HostError) as caught:
        windows.find_systemctl()
    assert caught.value.kind == "usage"
    assert str(caught.value) == "there is no systemd on Windows: use `scheduled-events-agent service install`"


@at_rest
def test_print_shows_every_file_and_writes_none() -> None:
    done = command("--print")
    assert done.returncode == 0
    program = Path(sys.executable).with_name("scheduled-events-agent")
    unit = systemd_unit.marked(systemd_unit.unit_text(SHIPPED, program))
    assert done.stdout == f"# file {UNIT_FILE}\n{unit}\n# no file {STRICT_FILE}\n# no file {RULE_FILE}\n"
    assert not UNIT_FILE.exists()


@at_rest
def test_remove_goes_with_no_option_that_installs() -> None:
    done = command("--remove", "--strict")
    assert (done.returncode, done.stderr) == (
        2,
        "scheduled-events-agent: --remove goes with neither --strict nor --now\n",
    )
