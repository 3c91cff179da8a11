"""The agent's systemd unit where no package brought one, and the strict set-up for any: ``install-unit``.

Knows nothing of events or of the policy: the units that hooks may start are passed in. The one invariant: a file
that it did not write is neither replaced nor removed. It can be imported on Windows, but not used.
"""

import json
import os
import re
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import agent
from agent import AgentError, host
from agent.host import processes

NAME = "scheduled-events-agent"
UNIT = f"{NAME}.service"
USER = NAME
"""The account of the strict set-up."""

ETC = Path("/etc", NAME)
STATE = Path("/var/lib", NAME)
UNIT_FILE = Path("/etc/systemd/system", UNIT)
STRICT_FILE = Path("/etc/systemd/system", f"{UNIT}.d", "50-strict.conf")
RULE_FILE = Path("/etc/polkit-1/rules.d", f"50-{NAME}.rules")

_POLICY = ETC / "policy.yaml"
_DIRECTORIES = ((ETC, 0o755), (ETC / "hooks", 0o755), (ETC / "credentials", 0o700))
_PACKAGED_CODE = Path("/usr/lib", NAME)
_PACKAGED_PROGRAM = Path("/usr/bin", NAME)
_PACKAGED_UNIT = Path("/usr/lib/systemd/system", UNIT)
_POLKIT = Path("/usr/share/dbus-1/system-services/org.freedesktop.PolicyKit1.service")
# What the strict set-up does not see (ProtectHome=).
_HIDDEN = (Path("/home"), Path("/root"), Path("/run/user"))
# What systemd and a shell both read as it stands.
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9/._+@,:=~-]*")
# The Debian package looks for this line, too.
_MARK = re.compile(rf"(#|//) Written by {NAME} install-unit\b")


class UnitError(AgentError):
    """The unit cannot be written, or not here; the message names the way out."""


class Place(NamedTuple):
    """Where this program is installed."""

    program: Path
    """What a person types; the unit runs it."""
    systemd: Path
    """The folder with the unit, the drop-in and the polkit rule as they are shipped."""
    policy: Path
    """The policy file as it is shipped."""
    code: tuple[Path, ...]
    """What is executed when the program runs."""
    is_packaged: bool


def find_place() -> Place:
    """Where the running program is installed. Raises UnitError if its unit did not come with it."""
    package = Path(agent.__file__).parent
    is_packaged = package.is_relative_to(_PACKAGED_CODE)
    program = _PACKAGED_PROGRAM if is_packaged else Path(sysconfig.get_path("scripts"), NAME)
    share = Path("/usr" if is_packaged else sysconfig.get_path("data"), "share", NAME)
    systemd, policy = share / "systemd", share / "policy.yaml"
    if (package.parent / "systemd" / UNIT).is_file():  # an editable installation: they are in the source tree
        systemd, policy = package.parent / "systemd", package.parent / "config" / "policy.yaml"
    for file in (program, systemd / "strict.conf", *(() if is_packaged else (systemd / UNIT, policy))):
        if not file.is_file():
            raise UnitError(f"{file}: not found; install the agent with pip or pipx, and run that one")
    libraries = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    venv = () if is_packaged or sys.prefix == sys.base_prefix else Path(sys.prefix).rglob("*")
    code = (program, Path(sys.executable), *sorted(libraries), package, *package.rglob("*.py"), *venv)
    return Place(program, systemd, policy, code, is_packaged=is_packaged)


def check_place(place: Place) -> None:
    """Raises UnitError if others than root could change what the service runs, which would make them root."""
    # Others can put something in its place when a folder for temporary files is cleared one day.
    folders = {folder for path in place.code for folder in (*path.parents, *path.resolve().parents)}
    faults = [
        f"{folder} is for temporary files"
        for folder in folders
        if folder.exists() and folder.stat().st_mode & stat.S_ISVTX
    ]
    for path in place.code:
        if os.path.lexists(path) and (uid := path.lstat().st_uid) != 0:
            faults.append(f"{path} belongs to uid {uid}")
        elif fault := host.tampering_fault(path):
            faults.append(fault)
    if faults:
        raise UnitError(
            f"{faults[0]}; a system service must be installed where only root can write: with pipx install "
            f"--global, or in a venv that root makes under /opt (python3 -m venv /opt/{NAME})",
            kind="place",
        )


def files_of(place: Place, units: Collection[str], *, is_strict: bool) -> dict[Path, str | None]:
    """The files of the set-up; None where there must be none. Raises UnitError."""
    files: dict[Path, str | None] = {}
    if not place.is_packaged:
        files[UNIT_FILE] = marked(unit_text((place.systemd / UNIT).read_text(encoding="utf-8"), place.program))
    files[STRICT_FILE] = marked((place.systemd / "strict.conf").read_text(encoding="utf-8")) if is_strict else None
    files[RULE_FILE] = None
    if is_strict and units:
        rule = polkit_rule((place.systemd / "polkit.rules").read_text(encoding="utf-8"), units)
        files[RULE_FILE] = marked(rule, comment="//")
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


def polkit_rule(template: str, units: Iterable[str]) -> str:
    """The shipped rule, which lets the agent's account start, stop and kill these units and no others."""
    listed = ",\n".join(f"    {json.dumps(name)}" for name in sorted(set(units)))
    return template.replace("scheduledEventsUnits = [];", f"scheduledEventsUnits = [\n{listed}\n];")


def unnamed_units(units: Iterable[str]) -> list[str] | None:
    """Those that the installed polkit rule does not let the agent start; None if the rule cannot be read."""
    try:
        text = RULE_FILE.read_text(encoding="utf-8")
    except FileNotFoundError:
        text = ""
    except (OSError, UnicodeDecodeError):
        return None
    return [name for name in sorted(set(units)) if json.dumps(name) not in text]


def marked(body: str, comment: str = "#") -> str:
    """The text under a line that says what wrote it."""
    # With the version: an upgrade of the program is a change of the unit, so that --now starts the new one.
    mark = f"{comment} Written by {NAME} install-unit, version {agent.__version__}: edits here are lost."
    return f"{mark}\n{body}"


def install(place: Place, units: Collection[str], *, is_strict: bool, is_now: bool) -> list[str]:
    """Set the agent up; returns what was done, one line each. Raises UnitError.

    A system that is not booted, such as an image, is set up for its first boot.
    """
    if not place.is_packaged and _PACKAGED_UNIT.exists():
        own = f"run {_PACKAGED_PROGRAM} install-unit, the package's own, or remove the package first"
        raise UnitError(f"{_PACKAGED_UNIT}: a package brought this unit; {own}", kind="place")
    if is_strict and any(place.program.resolve().is_relative_to(folder) for folder in _HIDDEN):
        way_out = f"install the agent with pipx install --global, or in /opt/{NAME}, or without --strict"
        raise UnitError(f"{place.program}: the strict set-up cannot see it; {way_out}", kind="place")
    changes = _changes(files_of(place, units, is_strict=is_strict))
    os.umask(0o022)  # polkit reads its rules as a user of its own
    done = _make_account(place) if is_strict else []
    if not place.is_packaged:
        done += _make_directories(place)
    done += _apply(changes)
    is_booted, is_active = _is_booted(), _asks("is-active")
    if is_booted:
        _systemctl("daemon-reload")
    if not place.is_packaged and not _asks("is-enabled"):
        _systemctl("enable", UNIT)
        done.append("enabled the agent: it starts at boot")
    must_start = (is_now and (bool(changes) or not is_active)) or (is_active and STRICT_FILE in changes)
    if must_start and is_booted:
        _systemctl("restart", UNIT)
        done.append("restarted the agent" if is_active else "started the agent")
    elif must_start:
        done.append("systemd does not run here: nothing was started")
    elif changes:
        is_what = "runs as before" if is_active else "does not run"
        done.append(f"the agent {is_what} until the next boot, or until: systemctl restart {NAME}")
    if is_strict and units and not _POLKIT.exists():
        done.append("there is no polkit here: hooks that are units cannot start before it is installed")
    return done


def remove(place: Place) -> list[str]:
    """Take back what ``install`` wrote; returns what was done. An agent without a package is stopped and disabled.

    A packaged one goes on as the package has it. Raises UnitError if another program wrote a file.
    """
    files = (RULE_FILE, STRICT_FILE) if place.is_packaged else (RULE_FILE, STRICT_FILE, UNIT_FILE)
    changes = _changes(dict.fromkeys(files))
    if not changes:
        return []
    done, is_active = [], _asks("is-active")
    if UNIT_FILE in changes:
        _systemctl("disable", *(["--now"] if is_active else []), UNIT)
        done.append("stopped and disabled the agent" if is_active else "disabled the agent")
    done += _apply(changes)
    if _is_booted():
        _systemctl("daemon-reload")
    if is_active and place.is_packaged:
        _systemctl("restart", UNIT)
        done.append("restarted the agent, as the package has it")
    return done


def _is_booted() -> bool:
    return Path("/run/systemd/system").is_dir()  # as sd_booted(3) does


def _systemctl(*words: str, may_say_no: bool = False) -> bool:
    """Whether systemctl has done it. Raises UnitError if it has not, and ``may_say_no`` is false."""
    command = [processes.find_systemctl(), *words, "--quiet"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0 and not may_say_no:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise UnitError(f"systemctl {' '.join(words)}: {said}", kind="systemctl")
    return done.returncode == 0


def _asks(question: str) -> bool:
    """Whether systemctl says yes, for example that the agent ``is-active``."""
    return _systemctl(question, UNIT, may_say_no=True)


def _changes(files: dict[Path, str | None]) -> dict[Path, str | None]:
    """Those that are not as they have to be. Raises UnitError if install-unit did not write one."""
    changes = {}
    for path, text in files.items():
        there = None
        if os.path.lexists(path):
            there = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        if there is not None and there != text and not _MARK.match(there):
            raise UnitError(f"{path}: not written by install-unit: move it away, then run this again", kind="file")
        if there != text:
            changes[path] = text
    return changes


def _apply(changes: dict[Path, str | None]) -> list[str]:
    for path, text in changes.items():
        if text is None:
            path.unlink()
        else:
            _write(path, text)
    with suppress(OSError):  # it is not there, or has drop-ins of the operator
        STRICT_FILE.parent.rmdir()
    return [f"{'removed' if text is None else 'wrote'} {path}" for path, text in changes.items()]


def _write(path: Path, text: str) -> None:
    """Write the file beside its place and rename it: a crash leaves the old one or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")  # systemd and polkit read no file of such a name
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    host.flush_directory(path.parent)


def _make_directories(place: Place) -> list[str]:
    for path, mode in _DIRECTORIES:
        path.mkdir(mode, exist_ok=True)
    if os.path.lexists(_POLICY):
        return []
    _write(_POLICY, place.policy.read_text(encoding="utf-8"))
    return [f"wrote {_POLICY}"]


def _make_account(place: Place) -> list[str]:
    """Make the account of the strict set-up. Raises UnitError if it cannot run the program or read the policy."""
    done = []
    if not host.has_account(USER):
        line = f'u {USER} - "Azure Scheduled Events agent" {STATE}\n'
        made = subprocess.run(["systemd-sysusers", "-"], input=line, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            told = made.stderr.strip()
            raise UnitError(f"systemd-sysusers cannot make the account {USER}: {told}", kind="account")
        done.append(f"made the account {USER}")
    if place.program.exists() and (fault := processes.access_fault(place.program, "execute", USER)):
        way_out = f"chmod o+rX the directories there, or install the agent in /opt/{NAME}"
        raise UnitError(f"{place.program}: {fault}: {way_out}", kind="place")
    if os.path.lexists(_POLICY) and (fault := processes.access_fault(_POLICY, "read", USER)):
        way_out = f"chgrp {USER} {_POLICY} && chmod g+r {_POLICY}"
        raise UnitError(f"{_POLICY}: {fault}, so the agent would not start: {way_out}", kind="place")
    return done
