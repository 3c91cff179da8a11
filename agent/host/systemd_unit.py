"""The agent's systemd unit where no package brought one, and the strict set-up for any: ``install-unit``.

Knows nothing of events or of the policy: the units that hooks may start are passed in. The one invariant: a file
that it did not write is neither replaced nor removed. It can be imported on Windows, but not used.
"""

import json
import os
import re
import site
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import agent
from agent import AgentError, host

NAME = "scheduled-events-agent"
UNIT = f"{NAME}.service"
USER = NAME
"""The account of the strict set-up."""

ETC = Path("/etc", NAME)
STATE = Path("/var/lib", NAME)
UNIT_FILE = Path("/etc/systemd/system", UNIT)
STRICT_FILE = Path("/etc/systemd/system", f"{UNIT}.d", "50-strict.conf")
RULE_FILE = Path("/etc/polkit-1/rules.d", f"50-{NAME}.rules")

_DIRECTORIES = ((ETC, 0o755), (ETC / "hooks", 0o755), (ETC / "credentials", 0o700))
_PACKAGED_CODE = Path("/usr/lib", NAME)
_PACKAGED_PROGRAM = Path("/usr/bin", NAME)
_PACKAGED_UNITS = (Path("/usr/lib/systemd/system", UNIT), Path("/lib/systemd/system", UNIT))
_POLKIT = Path("/usr/share/dbus-1/system-services/org.freedesktop.PolicyKit1.service")

# What neither systemd nor a shell nor the first line of a script reads as anything but itself.
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9/._+@,:=~-]*")
# The Debian package looks for this line, too.
_MARK = re.compile(rf"(#|//) Written by {NAME} install-unit\b")
# What the strict set-up does not see (ProtectHome).
_HIDDEN = (Path("/home"), Path("/root"), Path("/run/user"))


class UnitError(AgentError):
    """The unit cannot be written, or not here; the message names the way out."""


class Place(NamedTuple):
    """Where this program is installed."""

    program: Path
    """What a person types; the unit runs it."""
    systemd: Path
    """The folder with the unit and the drop-in as they are shipped."""
    policy: Path
    """The policy file as it is shipped."""
    code: tuple[Path, ...]
    """What is executed when the program runs."""
    is_packaged: bool
    venv: Path | None = None
    """A folder whose whole content may be executed, too."""


def find_place() -> Place:
    """Where the running program is installed. Raises UnitError if its unit did not come with it."""
    package = Path(agent.__file__).parent
    # Where Python looks for modules in the service too: without this session's folder, variables and user.
    of_session = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), site.getusersitepackages()]
    libraries = [Path(entry) for entry in sys.path[1:] if entry[:1] == os.sep and entry not in of_session]
    is_packaged = package.is_relative_to(_PACKAGED_CODE)
    share = Path("/usr" if is_packaged else sysconfig.get_path("data"), "share", NAME)
    systemd, policy = share / "systemd", share / "policy.yaml"
    if (package.parent / "systemd" / UNIT).is_file():  # an editable installation: they are in the source tree
        systemd, policy = package.parent / "systemd", package.parent / "config" / "policy.yaml"
    program = _PACKAGED_PROGRAM if is_packaged else Path(sysconfig.get_path("scripts"), NAME)
    for file in (program, systemd / "strict.conf", *(() if is_packaged else (systemd / UNIT, policy))):
        if not file.is_file():
            raise UnitError(f"{file}: not found; install the agent with pip or pipx, and run that one")
    code = (program, Path(sys.executable), *libraries, package, *package.rglob("*.py"))
    venv = None if is_packaged or sys.prefix == sys.base_prefix else Path(sys.prefix)
    return Place(program, systemd, policy, code, is_packaged=is_packaged, venv=venv)


def check_place(place: Place) -> None:
    """Raises UnitError if others than root could change what the service runs, which would make them root."""
    where = (
        "; a system service must be installed where only root can write: with pipx install --global, or in a venv "
        f"that root makes under /opt (python3 -m venv /opt/{NAME})"
    )
    for path in place.code:
        if path.exists() and (uid := path.stat().st_uid) != 0:
            raise UnitError(f"{path} belongs to uid {uid}{where}", kind="place")
        if fault := host.tampering_fault(path):
            raise UnitError(f"{fault}{where}", kind="place")
        # Others can put something in its place when the folder is cleared one day.
        temporary = [folder for folder in (*path.parents, *path.resolve().parents) if _is_sticky(folder)]
        if temporary:
            raise UnitError(f"{temporary[0]} is for temporary files{where}", kind="place")
    for path in place.venv.rglob("*") if place.venv else ():
        facts = path.lstat()
        if facts.st_uid != 0:
            raise UnitError(f"{path} belongs to uid {facts.st_uid}{where}", kind="place")
        if facts.st_mode & 0o022 and not stat.S_ISLNK(facts.st_mode):
            mode = stat.S_IMODE(facts.st_mode)
            raise UnitError(f"{path} can be changed by others than root (mode {mode:04o}){where}", kind="place")


def _is_sticky(folder: Path) -> bool:
    return folder.exists() and bool(folder.stat().st_mode & stat.S_ISVTX)


def files_of(place: Place, units: Iterable[str], *, is_strict: bool) -> dict[Path, str | None]:
    """The files of the set-up; None where there must be none. Raises UnitError."""
    files: dict[Path, str | None] = {}
    if not place.is_packaged:
        files[UNIT_FILE] = marked(unit_text((place.systemd / UNIT).read_text(encoding="utf-8"), place.program))
    files[STRICT_FILE] = marked((place.systemd / "strict.conf").read_text(encoding="utf-8")) if is_strict else None
    rule = polkit_rule(units) if is_strict else ""
    files[RULE_FILE] = marked(rule, comment="//") if rule else None
    return files


def unit_text(template: str, program: Path) -> str:
    """The shipped unit with the program at its place. Raises UnitError for a path that needs quoting."""
    if not _PLAIN_PATH.fullmatch(str(program)):
        raise UnitError(
            f"{program}: expected a path of ASCII letters, digits and /._+@,:=~- only, which systemd and shells "
            f"read as it stands; install the agent under another one, such as /opt/{NAME}",
            kind="place",
        )
    return re.sub(rf"(?m)^(Exec\w+=){_PACKAGED_PROGRAM}(?= )", rf"\g<1>{program}", template)


def polkit_rule(units: Iterable[str]) -> str:
    """The rule that lets the agent's account start, stop and kill these units and no others; empty for none."""
    listed = ",\n".join(f"    {json.dumps(name)}" for name in sorted(set(units)))
    if not listed:
        return ""
    return f"""\
// The hooks of the policy that are systemd units: the agent may start, stop and kill these, have systemd keep how
// they ended ("ref"), and do nothing else.
// Run "{NAME} install-unit --strict" again when the policy names others.
var scheduledEventsUnits = [
{listed}
];
// Newer systemds (257, for one) call it a "start", too, when a client brings a unit of its own making
// (StartTransientUnit). While there is no file of that name, the agent's account would be root by it. Only the
// message tells the two apart.
var scheduledEventsStart = "Authentication is required to start '$(unit)'.";
polkit.addRule(function (action, subject) {{
    if (action.id == "org.freedesktop.systemd1.manage-units"
            && subject.user == {json.dumps(USER)}
            && scheduledEventsUnits.indexOf(action.lookup("unit")) >= 0
            && ["start", "stop", "kill", "ref"].indexOf(action.lookup("verb")) >= 0
            && (action.lookup("verb") != "start" || action.lookup("polkit.message") == scheduledEventsStart)) {{
        return polkit.Result.YES;
    }}
}});
"""


def unnamed_units(units: Iterable[str], root: Path = Path("/")) -> list[str] | None:
    """Those that the installed polkit rule does not let the agent start; None if the rule cannot be read."""
    try:
        text = _at(root, RULE_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        text = ""
    except (OSError, UnicodeDecodeError):
        return None
    return [name for name in sorted(set(units)) if json.dumps(name) not in text]


def is_polkit_missing(root: Path = Path("/")) -> bool:
    """Whether there is a polkit rule and no polkit to read it."""
    return _at(root, RULE_FILE).exists() and not _at(root, _POLKIT).exists()


def marked(body: str, comment: str = "#") -> str:
    """The text under a line that says what wrote it."""
    # With the version: an upgrade of the program is a change of the unit, so that --now starts the new one.
    mark = f"{comment} Written by {NAME} install-unit, version {agent.__version__}: edits here are lost."
    return f"{mark}\n{body}"


def install(
    place: Place, units: Iterable[str], *, is_strict: bool, is_now: bool, root: Path = Path("/")
) -> list[str]:
    """Set the agent up; returns what was done, one line each. Raises UnitError.

    ``root`` is the system's root directory. Another one, or one without systemd running, is a system at rest.
    """
    systemctl = _Systemctl(root)
    for path in () if place.is_packaged else _PACKAGED_UNITS:
        if _at(root, path).exists():
            own = f"run {_PACKAGED_PROGRAM} install-unit, the package's own, or remove the package first"
            raise UnitError(f"{path}: a package brought this unit; {own}", kind="place")
    if systemctl.run("is-enabled", UNIT).stdout.startswith("masked"):
        way_out = f"if that is over, systemctl unmask {NAME}, then run this again"
        raise UnitError(f"{UNIT} is masked, so that nothing can start it: {way_out}", kind="masked")
    changes = _changes(files_of(place, units, is_strict=is_strict), root)
    os.umask(0o022)  # polkit reads its rules as a user of its own
    done = _make_account(root) if is_strict else []
    if is_strict and root == Path("/"):
        _check_reach(place)
    if not place.is_packaged:
        done += _make_directories(place, root)
    done += _apply(changes, root)
    if changes and systemctl.is_running:
        systemctl("daemon-reload")
    if not place.is_packaged and not systemctl.asks("is-enabled"):
        systemctl("enable", "--quiet", UNIT)
        done.append("enabled the agent: it starts at boot")
    is_active = systemctl.asks("is-active")
    # What the agent has in /run and /var/lib belongs to one account or the other: it must be down meanwhile.
    must_start = (is_now and (bool(changes) or not is_active)) or (is_active and STRICT_FILE in changes)
    may_start = must_start and systemctl.is_running
    if may_start and is_active:
        systemctl("stop", UNIT)
    if not is_strict and (may_start or not is_active):
        _take_state_back(root)
    if may_start:
        systemctl("start", UNIT)
        done.append("restarted the agent" if is_active else "started the agent")
    elif must_start:
        done.append("systemd does not run here: nothing was started")
    elif changes:
        is_what = "runs as before" if is_active else "does not run"
        done.append(f"the agent {is_what} until the next boot, or until: systemctl restart {NAME}")
    return done


def remove(place: Place, root: Path = Path("/")) -> list[str]:
    """Take back what ``install`` wrote; returns what was done. An agent without a package is stopped and disabled.

    A packaged one goes on as the package has it. Raises UnitError if another program wrote a file.
    """
    systemctl = _Systemctl(root)
    files = (RULE_FILE, STRICT_FILE) if place.is_packaged else (RULE_FILE, STRICT_FILE, UNIT_FILE)
    changes = _changes(dict.fromkeys(files), root)
    if not changes:
        return []
    done: list[str] = []
    was_active = systemctl.asks("is-active")
    if was_active:
        systemctl("stop", UNIT)
        done.append("stopped the agent")
    if UNIT_FILE in changes and systemctl.asks("is-enabled"):
        systemctl("disable", "--quiet", UNIT)
        done.append("disabled the agent")
    done += _apply(changes, root)
    _take_state_back(root)
    if systemctl.is_running:
        systemctl("daemon-reload")
        if UNIT_FILE in changes:
            systemctl.asks("reset-failed")
        elif was_active:
            systemctl("start", UNIT)
            done.append("started the agent, as the package has it")
    return done


class _Systemctl:
    """systemctl, for a system that runs or one that is at rest."""

    def __init__(self, root: Path) -> None:
        self._command = [host.find_systemctl(), *([] if root == Path("/") else [f"--root={root}"])]
        self.is_running = root == Path("/") and Path("/run/systemd/system").is_dir()  # as sd_booted(3) does

    def __call__(self, *words: str) -> None:
        done = self.run(*words)
        if done.returncode != 0:
            said = done.stderr.strip() or f"exit code {done.returncode}"
            raise UnitError(f"systemctl {' '.join(words)}: {said}", kind="systemctl")

    def asks(self, question: str) -> bool:
        """Whether systemctl says yes, for example that the agent ``is-active``."""
        return (self.is_running or question != "is-active") and self.run(question, "-q", UNIT).returncode == 0

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        command = [*self._command, *words]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def _changes(files: dict[Path, str | None], root: Path) -> dict[Path, str | None]:
    """Those that are not as they have to be. Raises UnitError if install-unit did not write one."""
    changes = {}
    for path, text in files.items():
        place = _at(root, path)
        there = None
        if os.path.lexists(place):
            there = place.read_text(encoding="utf-8", errors="replace") if place.is_file() else ""
        if there is not None and there != text and not _MARK.match(there):
            raise UnitError(f"{path}: not written by install-unit: move it away, then run this again", kind="file")
        if there != text:
            changes[path] = text
    return changes


def _apply(changes: dict[Path, str | None], root: Path) -> list[str]:
    for path, text in changes.items():
        place = _at(root, path)
        if text is None:
            place.unlink()
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            fresh = place.with_name(f".{place.name}.new")  # the file is there whole or not at all
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(place)
    with suppress(OSError):  # it is not there, or has drop-ins of the operator
        _at(root, STRICT_FILE.parent).rmdir()
    return [f"{'removed' if text is None else 'wrote'} {path}" for path, text in changes.items()]


def _make_directories(place: Place, root: Path) -> list[str]:
    done: list[str] = []
    for path, mode in _DIRECTORIES:
        if not _at(root, path).is_dir():
            _at(root, path).mkdir(mode)
            done.append(f"made {path}")
    policy = ETC / "policy.yaml"
    if not os.path.lexists(_at(root, policy)):  # the operator's from then on
        _at(root, policy).write_text(place.policy.read_text(encoding="utf-8"), encoding="utf-8")
        done.append(f"wrote {policy}")
    return done


def _make_account(root: Path) -> list[str]:
    if f"\n{USER}:" in _at(root, Path("/etc/passwd")).read_text(errors="replace"):
        return []
    line = f'u {USER} - "Azure Scheduled Events agent" {STATE}\n'
    command = ["systemd-sysusers", f"--root={root}", "-"]
    try:
        subprocess.run(command, input=line, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        told = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        raise UnitError(f"systemd-sysusers cannot make the account {USER}: {told}", kind="account") from None
    return [f"made the account {USER}"]


def _check_reach(place: Place) -> None:
    """Raises UnitError if the account of the strict set-up cannot run the program or read the policy."""
    way_out = f"install the agent with pipx install --global, or in /opt/{NAME}, or without --strict"
    for path in place.code:
        if any(path.resolve().is_relative_to(hidden) for hidden in _HIDDEN):
            raise UnitError(f"{path}: the strict set-up cannot see it; {way_out}", kind="place")
        if path.suffix != ".py" and path.exists() and (fault := host.access_fault(path, "execute", USER)):
            raise UnitError(f"{fault}: chmod o+rX it, or {way_out}", kind="place")
    policy = ETC / "policy.yaml"
    question = ["/usr/bin/test", "-r", str(policy)]
    asked = subprocess.run(question, user=USER, group=USER, extra_groups=[], check=False)
    if os.path.lexists(policy) and asked.returncode != 0:
        raise UnitError(
            f"{policy}: the account {USER} cannot read it, so the agent would not start: chgrp {USER} {policy} "
            f"&& chmod g+r {policy} (and the directories on the way there must let that account through)",
            kind="place",
        )


def _take_state_back(root: Path) -> None:
    """Give root what the account of the strict set-up owned: systemd does so only the other way round."""
    state = _at(root, STATE)
    if sys.platform != "win32" and state.is_dir() and state.stat().st_uid != 0:
        for path in (state, *state.rglob("*")):
            os.lchown(path, 0, 0)


def _at(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")
