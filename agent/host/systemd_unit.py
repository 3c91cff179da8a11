"""The agent's systemd unit where no package brought one: its files, and how they come and go.

Owns what ``install-unit`` writes (unit, drop-in, polkit rule), where, and from which places a system service may
run at all. Knows nothing of events or of the policy: the units that hooks may start are told to it. The one
invariant: a file that somebody else wrote or edited is neither replaced nor removed unless that is asked for.

It can be imported everywhere; what runs programs needs Linux.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import agent
from agent import AgentError, host

NAME = "scheduled-events-agent"
UNIT = f"{NAME}.service"
USER = NAME
"""Whom the strict set-up runs as."""

ETC = Path("/etc", NAME)
STATE = Path("/var/lib", NAME)
UNIT_FILE = Path("/etc/systemd/system", UNIT)
STRICT_FILE = Path("/etc/systemd/system", f"{UNIT}.d", "50-strict.conf")
RULE_FILE = Path("/etc/polkit-1/rules.d", f"50-{NAME}.rules")

# Where packages put things.
_PACKAGED_CODE = Path("/usr/lib", NAME)
_PACKAGED_PROGRAM = Path("/usr/bin", NAME)
_PACKAGED_UNITS = (Path("/usr/lib/systemd/system", UNIT), Path("/lib/systemd/system", UNIT))
_POLKIT = Path("/usr/share/dbus-1/system-services/org.freedesktop.PolicyKit1.service")

# What neither systemd nor a shell nor the first line of a script reads as anything but itself.
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9/._+@,:=~-]*")
_UNIT_NAME = re.compile(r"[A-Za-z0-9:_.\\@-]{1,247}\.service")
_SEAL = re.compile(r"(?:#|//) Written by .* \(sha256 (?P<digest>[0-9a-f]{64})\)\.\n")
# What the strict set-up does not see (ProtectHome).
_HIDDEN = (Path("/home"), Path("/root"), Path("/run/user"))


class UnitError(AgentError):
    """The unit cannot be written, or not here; the message names the way out."""


class Place(NamedTuple):
    """Where this program is installed."""

    program: Path
    """What a person types; the unit runs it."""
    systemd: Path
    """The folder with the unit, the drop-in and the account as they are shipped."""
    policy: Path
    """The policy file as it is shipped."""
    code: tuple[Path, ...]
    """What is executed when the program runs."""
    trees: tuple[Path, ...]
    """Folders whose whole content is; what the system's own packages brought is not asked about."""
    is_packaged: bool


class File(NamedTuple):
    """A text file to be there."""

    path: Path
    text: str
    is_seed: bool = False
    """Written if there is none, and the operator's from then on."""


class Plan(NamedTuple):
    """What is to be on the machine; the paths are those of the running system."""

    directories: tuple[tuple[Path, int], ...]
    """With their modes."""
    files: tuple[File, ...]
    obsolete: tuple[Path, ...]
    """What another set-up has written and this one must not have."""
    account: str
    """Lines for systemd-sysusers; empty if the agent is to run as root."""
    is_packaged: bool


def find_place() -> Place:
    """Where the running program is installed. Raises UnitError if its unit did not come with it."""
    package = Path(agent.__file__).parent
    interpreter, libraries = Path(sys.executable), _libraries()
    if package.is_relative_to(_PACKAGED_CODE):
        share = Path("/usr/share", NAME)
        code = (_PACKAGED_PROGRAM, interpreter, *libraries, package)
        return Place(_PACKAGED_PROGRAM, share / "systemd", share / "policy.yaml", code, (), is_packaged=True)
    program = Path(sysconfig.get_path("scripts"), NAME)
    share = Path(sysconfig.get_path("data"), "share", NAME)
    systemd, policy = share / "systemd", share / "policy.yaml"
    source = package.parent
    if (source / "systemd" / UNIT).is_file():  # an editable installation: what is shipped is in the source tree
        systemd, policy = source / "systemd", source / "config" / "policy.yaml"
    for file in (program, systemd / UNIT):
        if not file.is_file():
            raise UnitError(
                f"{file}: not found; install the agent with pip or pipx, and run that one",
                kind="place",
            )
    trees = (package,) if sys.prefix == sys.base_prefix else (package, Path(sys.prefix))
    return Place(program, systemd, policy, (program, interpreter, *libraries, *trees), trees, is_packaged=False)


def _libraries() -> list[Path]:
    """Where Python looks for modules in the service too: without this session's folder, variables and user."""
    import site  # noqa: PLC0415 - only this command needs it

    of_session = {*os.environ.get("PYTHONPATH", "").split(os.pathsep), site.getusersitepackages()}
    return [Path(entry) for entry in sys.path[1:] if entry not in of_session]


def plan_unit(place: Place, units: Iterable[str], *, is_strict: bool) -> Plan:
    """What has to be there for an agent at this place whose hooks are ``units``. Raises UnitError."""
    files: list[File] = []
    obsolete: list[Path] = []
    directories: tuple[tuple[Path, int], ...] = ()
    if not place.is_packaged:
        directories = ((ETC, 0o755), (ETC / "hooks", 0o755), (ETC / "credentials", 0o700))
        files.append(File(UNIT_FILE, sealed(unit_text(_read(place.systemd / UNIT), place.program))))
        files.append(File(ETC / "policy.yaml", _read(place.policy), is_seed=True))
    rule = polkit_rule(units) if is_strict else ""
    account = ""
    if is_strict:
        files.append(File(STRICT_FILE, sealed(_read(place.systemd / "strict.conf"))))
        account = f'u {USER} - "Azure Scheduled Events agent" {STATE}\n'
    else:
        obsolete.append(STRICT_FILE)
    if rule:
        files.append(File(RULE_FILE, sealed(rule, comment="//")))
    else:
        obsolete.append(RULE_FILE)
    return Plan(directories, tuple(files), tuple(obsolete), account, place.is_packaged)


def unit_text(template: str, program: Path) -> str:
    """The shipped unit with the program at its place. Raises UnitError for a path that needs quoting."""
    if not _PLAIN_PATH.fullmatch(str(program)):
        raise UnitError(
            f"{program}: expected a path of ASCII letters, digits and /._+@,:=~- only, which systemd and shells "
            f"read as it stands; install the agent under another one, such as /opt/{NAME}",
            kind="place",
        )
    text, count = re.subn(
        rf"^(Exec\w+=[-@:+!]*){re.escape(str(_PACKAGED_PROGRAM))}(?= )",
        lambda match: f"{match[1]}{program}",
        template,
        flags=re.MULTILINE,
    )
    if count == 0:
        raise UnitError(
            f"the shipped {UNIT} does not run {_PACKAGED_PROGRAM}: install the agent anew", kind="place"
        )
    return text


def polkit_rule(units: Iterable[str]) -> str:
    """The rule that lets the agent's account start, stop and kill these units and no others; empty for none."""
    names = sorted(set(units))
    for name in names:
        if not _UNIT_NAME.fullmatch(name):
            raise UnitError(
                f"{name!r} is no name of a service unit: expected one such as drain-web.service", kind="unit"
            )
    if not names:
        return ""
    listed = ",\n".join(f"    {json.dumps(name)}" for name in names)
    return f"""\
// The hooks of the policy that are systemd units: the agent may start, stop and kill these, have systemd keep how
// they ended ("ref"), and do nothing else.
// Written anew by "{NAME} install-unit --strict" when the policy names others.
var scheduledEventsUnits = [
{listed}
];
// Newer systemds (257, for one) call it a "start" too when somebody brings a unit of his own making
// (StartTransientUnit): while there is no file of that name, the agent's account would be root by it. Only the
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
    """Those that the installed polkit rule does not let the agent start; None if that cannot be read."""
    try:
        text = _at(root, RULE_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        text = ""
    except (OSError, UnicodeDecodeError):
        return None
    return [name for name in sorted(set(units)) if json.dumps(name) not in text]


def sealed(body: str, comment: str = "#") -> str:
    """The text under a line that tells who wrote it, and whether anybody edited it since."""
    digest = hashlib.sha256(body.encode()).hexdigest()
    # With the version: an upgrade of the program is a change of the unit, so that --now starts the new one.
    return f"{comment} Written by {NAME} install-unit, version {agent.__version__} (sha256 {digest}).\n{body}"


def is_untouched(text: str) -> bool:
    """Whether ``sealed`` made this text and nobody edited it since."""
    seal = _SEAL.match(text)
    return seal is not None and hashlib.sha256(text[seal.end() :].encode()).hexdigest() == seal["digest"]


def check_place(place: Place, *, is_strict: bool) -> None:
    """Raises UnitError if others than root could change what the service runs, or if it could not reach it."""
    for path in place.code:
        for part in _chain(path):
            fault = _fault(part) or (_distance(part) if is_strict else "")
            if fault:
                raise UnitError(f"{part}: {fault}", kind="place")
    for part in (part for tree in place.trees for part in _tree(tree)):
        fault = _fault(part)
        if fault:
            raise UnitError(f"{part}: {fault}", kind="place")


def install(plan: Plan, *, is_now: bool, is_forced: bool, root: Path = Path("/")) -> list[str]:
    """Put the plan into effect; returns what was done, in words, one line each. Raises UnitError.

    ``root`` is the system's root directory; another one, or one without systemd running, is a system at rest.
    """
    systemctl = _Systemctl(root)
    if not plan.is_packaged:
        _check_rival(root)
    if systemctl.state().startswith("masked"):
        raise UnitError(
            f"{UNIT} is masked, so that nothing can start it: if that is over, systemctl unmask {NAME}, then run "
            "this again",
            kind="masked",
        )
    written = [file for file in plan.files if _is_news(file, root, is_forced=is_forced)]
    removed = [path for path in plan.obsolete if _is_ours(path, root, is_forced=is_forced)]
    done: list[str] = []
    if plan.account and _make_account(plan.account, root):
        done.append(f"made the account {USER}")
    if plan.account and root == Path("/"):
        _check_policy()
    for path, mode in plan.directories:
        if _make_directory(_at(root, path), mode):
            done.append(f"made {path}")
    for file in written:
        _write(_at(root, file.path), file.text)
        done.append(f"wrote {file.path}")
    for path in removed:
        _unlink(_at(root, path))
        done.append(f"removed {path}")
    is_changed = any(not file.is_seed for file in written) or bool(removed)
    # What the agent has in /run and /var/lib belongs to the account before: it must be down meanwhile.
    is_switched = STRICT_FILE in removed or any(file.path == STRICT_FILE for file in written)
    is_now = is_now or (is_switched and systemctl.asks("is-active"))
    return done + _bring_up(systemctl, plan, is_changed=is_changed, is_now=is_now, root=root)


def remove(place: Place, *, is_forced: bool, root: Path = Path("/")) -> list[str]:
    """Take back what ``install`` wrote; returns what was done. An agent without a package is stopped and disabled.

    A packaged one goes on as the package has it. Raises UnitError if a file was edited.
    """
    systemctl = _Systemctl(root)
    wanted = (RULE_FILE, STRICT_FILE) if place.is_packaged else (RULE_FILE, STRICT_FILE, UNIT_FILE)
    found = [path for path in wanted if _is_ours(path, root, is_forced=is_forced)]
    done: list[str] = []
    was_active = systemctl.asks("is-active")
    has_unit = UNIT_FILE in found
    if found and was_active:
        systemctl("stop", UNIT)
        done.append("stopped the agent")
    if has_unit and systemctl.asks("is-enabled"):
        systemctl("disable", "--quiet", UNIT)
        done.append("disabled the agent")
    for path in found:
        _unlink(_at(root, path))
        done.append(f"removed {path}")
    if not found:
        return []
    _take_state_back(root)
    if systemctl.is_running:
        systemctl("daemon-reload")
        if has_unit:
            systemctl.asks("reset-failed")
        elif was_active:
            systemctl("start", UNIT)
            done.append("started the agent, as the package has it")
    return done


def is_polkit_missing(plan: Plan, root: Path = Path("/")) -> bool:
    """Whether the plan has a polkit rule and the machine no polkit to read it."""
    return any(file.path == RULE_FILE for file in plan.files) and not _at(root, _POLKIT).exists()


class _Systemctl:
    """systemctl, for a system that runs or one that is at rest."""

    def __init__(self, root: Path) -> None:
        self._program = host.find_systemctl()
        self._options = [] if root == Path("/") else [f"--root={root}"]
        # systemd makes this directory, and nobody else: the way sd_booted(3) tells.
        self.is_running = root == Path("/") and Path("/run/systemd/system").is_dir()

    def __call__(self, *words: str) -> None:
        done = self._run(words)
        if done.returncode != 0:
            said = done.stderr.strip() or f"exit code {done.returncode}"
            raise UnitError(f"systemctl {' '.join(words)}: {said}", kind="systemctl")

    def asks(self, question: str) -> bool:
        """Whether systemctl affirms, for example that the agent ``is-active``."""
        if question == "is-active" and not self.is_running:
            return False
        return self._run((question, "--quiet", UNIT)).returncode == 0

    def state(self) -> str:
        """What systemctl says of the unit's file, such as "enabled" or "masked"; empty if there is none."""
        return self._run(("is-enabled", UNIT)).stdout.strip()

    def _run(self, words: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        command = [self._program, *self._options, *words]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def _bring_up(systemctl: _Systemctl, plan: Plan, *, is_changed: bool, is_now: bool, root: Path) -> list[str]:
    done: list[str] = []
    if systemctl.is_running and is_changed:
        systemctl("daemon-reload")
    if not plan.is_packaged and not systemctl.asks("is-enabled"):
        systemctl("enable", "--quiet", UNIT)
        done.append("enabled the agent: it starts at boot")
    is_active = systemctl.asks("is-active")
    may_start = is_now and systemctl.is_running and (is_changed or not is_active)
    if may_start and is_active:
        systemctl("stop", UNIT)
    if not plan.account and (may_start or not is_active):
        _take_state_back(root)
    if may_start:
        systemctl("start", UNIT)
        done.append("restarted the agent" if is_active else "started the agent")
    elif is_now and not systemctl.is_running:
        done.append("systemd does not run here: nothing was started")
    elif is_changed:
        is_what = "runs as before" if is_active else "does not run"
        done.append(f"the agent {is_what} until the next boot, or until: systemctl restart {NAME}")
    return done


def _take_state_back(root: Path) -> None:
    """Give root what the account of the strict set-up owned: systemd does so only the other way round."""
    state = _at(root, STATE)
    if sys.platform == "win32" or not state.is_dir() or state.lstat().st_uid == 0:
        return
    for folder, _, names in os.walk(state):
        for path in (folder, *(os.path.join(folder, name) for name in names)):  # noqa: PTH118 - as walk gives them
            os.lchown(path, 0, 0)


def _make_account(lines: str, root: Path) -> bool:
    """Make the account; False if it is there."""
    passwd = _at(root, Path("/etc/passwd"))
    if passwd.is_file() and re.search(rf"^{re.escape(USER)}:", passwd.read_text(errors="replace"), re.MULTILINE):
        return False
    program = shutil.which("systemd-sysusers", path="/usr/bin:/bin")
    if program is None:
        raise UnitError(
            f"found no systemd-sysusers to make the account {USER} with: install it, or make the account yourself "
            f"(useradd --system --user-group {USER})",
            kind="account",
        )
    done = subprocess.run(
        [program, f"--root={root}", "-"], input=lines, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise UnitError(f"{program}: cannot make the account {USER}: {done.stderr.strip()}", kind="account")
    return True


def _check_policy() -> None:
    """Raises UnitError if the account cannot read the policy: with a strict umask, an editor leaves it to root."""
    policy = ETC / "policy.yaml"
    if not os.path.lexists(policy):
        return
    question = ["/usr/bin/test", "-r", str(policy)]
    if subprocess.run(question, user=USER, group=USER, extra_groups=[], check=False).returncode != 0:
        raise UnitError(
            f"{policy}: the account {USER} cannot read it, so the agent would not start: chgrp {USER} {policy} "
            f"&& chmod g+r {policy} (and the directories on the way there must let that account through)",
            kind="place",
        )


def _check_rival(root: Path) -> None:
    for path in _PACKAGED_UNITS:
        if _at(root, path).exists():
            raise UnitError(
                f"{path}: a package brought this unit; run {_PACKAGED_PROGRAM} install-unit, the package's own, "
                "or remove the package first",
                kind="place",
            )


def _is_news(file: File, root: Path, *, is_forced: bool) -> bool:
    """Whether the file has to be written. Raises UnitError if somebody else's would be lost."""
    there = _text_at(_at(root, file.path))
    if there is None:
        return True
    if file.is_seed or there == file.text:
        return False
    _check_seal(file.path, there, is_forced=is_forced)
    return True


def _is_ours(path: Path, root: Path, *, is_forced: bool) -> bool:
    """Whether there is such a file, to be removed. Raises UnitError if it is somebody else's."""
    there = _text_at(_at(root, path))
    if there is None:
        return False
    _check_seal(path, there, is_forced=is_forced)
    return True


def _check_seal(path: Path, text: str, *, is_forced: bool) -> None:
    if is_untouched(text) or is_forced:
        return
    way_out = (
        "put your changes into a file of its own beside it"
        if path == RULE_FILE
        else f"put your changes into a drop-in of your own (systemctl edit {NAME})"
    )
    raise UnitError(
        f"{path}: expected what install-unit wrote; it was edited, or written by somebody else: {way_out}, "
        "then run this again with --force",
        kind="edited",
    )


def _chain(path: Path) -> Iterator[Path]:
    """The path, all that lies above it, and the same of whatever links on the way lead to."""
    todo, seen = [path], set[Path]()
    while todo:
        path = Path(os.path.abspath(todo.pop()))  # noqa: PTH100 - resolve() would skip the links
        for part in (*reversed(path.parents), path):
            if part in seen or not os.path.lexists(part):
                continue
            seen.add(part)
            yield part
            if part.is_symlink():
                todo.append(part.parent.resolve() / part.readlink())
                todo.append(path.resolve())


def _tree(path: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(path):
        yield from (Path(folder, name) for name in (*folders, *names))


def _fault(path: Path) -> str:
    """Why the path is no place for a system service; empty if it is one."""
    facts = path.lstat()
    way_out = (
        "a system service must be installed where only root can write: with pipx install --global, or in a venv "
        f"that root makes under /opt (python3 -m venv /opt/{NAME})"
    )
    if facts.st_uid != 0:
        return f"belongs to uid {facts.st_uid}; {way_out}"
    # Sticky or not: what lies in /tmp is removed one day, and then anybody may put something in its place.
    if not stat.S_ISLNK(facts.st_mode) and facts.st_mode & 0o022:
        return f"others than root can write it (mode {stat.S_IMODE(facts.st_mode):04o}); {way_out}"
    return ""


def _distance(path: Path) -> str:
    """Why the account of the strict set-up cannot reach the path; empty if it can."""
    way_out = f"install the agent with pipx install --global, or in /opt/{NAME}, or without --strict"
    if path in _HIDDEN:
        return f"the strict set-up sees nothing below it; {way_out}"
    mode = path.lstat().st_mode
    needed = stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH
    if not stat.S_ISLNK(mode) and not mode & needed:
        return f"the account {USER} cannot use it (mode {stat.S_IMODE(mode):04o}): chmod o+rX it, or {way_out}"
    return ""


def _at(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UnitError(
            f"{path}: {error.strerror}; it comes with the agent: install that anew", kind="place"
        ) from None


def _text_at(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return "" if path.is_symlink() else None  # a dangling link is somebody's doing too
    except OSError as error:
        raise UnitError(f"{path}: cannot be read: {error.strerror}", kind="file") from None


def _make_directory(path: Path, mode: int) -> bool:
    """Make it, and what lies above it, whatever the umask; False if it is there."""
    if path.is_dir():
        return False
    # Not by parents=True, which heeds the umask: polkit reads its rules as a user of its own.
    _make_directory(path.parent, 0o755)
    path.mkdir()
    path.chmod(mode)
    return True


def _write(path: Path, text: str) -> None:
    """Have the file there whole or not at all."""
    _make_directory(path.parent, 0o755)
    fresh = path.with_name(f".{path.name}.new")
    with suppress(FileNotFoundError):
        fresh.unlink()
    fresh.write_text(text, encoding="utf-8")
    fresh.chmod(0o644)
    fresh.replace(path)


def _unlink(path: Path) -> None:
    path.unlink()
    if path.parent.name.endswith(".d") and path.parent.name.startswith(NAME):
        with suppress(OSError):  # the operator has drop-ins there too
            path.parent.rmdir()
