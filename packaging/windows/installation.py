"""The installer's actions besides placing files: it runs this, as the system, with the Python that it carries.

    python.exe -I -B installation.py check "MSI" "POLICY"    this version is to be replaced by that of the MSI
    python.exe -I -B installation.py enter "POLICY"    files and service are there, and the service may start next
    python.exe -I -B installation.py compile           the service runs
    python.exe -I -B installation.py undo              the installation failed after that
    python.exe -I -B installation.py halt              before files of an installed product are touched
    python.exe -I -B installation.py leave "PURGE" "NEWER"    before service and files go; NEWER replaces them
    python.exe -I -B installation.py return            what "halt" made way for failed; all is as it was before

These are the actions that tables of an MSI cannot express. The agent's own `service install` decides how the
service is set up. Invariant: a policy file that the agent would reject replaces nothing.

An installer gets nothing from a program but its exit code: errors are written to install.log beside this file.
"""  # noqa: INP001 - a script

import compileall
import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

_HOME = Path(__file__).parent
_LIB = _HOME / "lib"
_LOG = _HOME / "install.log"
# Their being there is what they say. The installer takes both away with the product, and back if that fails.
_POLICY_REPLACED = _HOME / "policy.replaced"
_HALTED = _HOME / "service.halted"
_BINARY = "SELECT `Data` FROM `Binary` WHERE `Name` = 'Agent'"
_REFUSED = 3  # an exit code of the version to come


def main(arguments: list[str]) -> int:
    """Do what the first argument says; returns the exit code."""
    action, argument, more = (*arguments, "", "")[:3]
    try:
        if action == "check":
            _check(argument, more)
        elif action == "enter":
            _enter(argument)
        elif action == "compile":
            compileall.compile_dir(_LIB, quiet=2, force=True)
        elif action == "undo":
            _undo()
        elif action == "halt":
            _halt()
        elif action == "leave":
            _leave(is_purge=argument == "1", is_upgrade=bool(more))
        else:
            _return()
    except Exception as error:  # noqa: BLE001 - the exit code says so, and the file why
        from scheduled_events_agent import AgentError  # noqa: PLC0415 - not before what was left of another version is gone

        message = str(error) if isinstance(error, (AgentError, _RefusedError)) else traceback.format_exc()
        with _LOG.open("a", encoding="utf-8") as log:
            log.write(f"installation.py {action}: {message.rstrip()}\n")
        return 1
    return 0


class _RefusedError(Exception):
    """The version to come would not start with the policy."""


def _check(msi: str, policy: str) -> None:
    """Have the version to come judge the policy while this one still runs; "" is the policy that is there.

    If a failure keeps that from being found out, the upgrade goes on: "enter" checks again.
    """
    from scheduled_events_agent.host import default_config_path  # noqa: PLC0415 - see main

    path = Path(policy) if policy else default_config_path()
    if not policy and not path.exists():
        return
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory() as directory:
        with contextlib.suppress(FileNotFoundError):  # which is what the check will say
            path.open("rb").close()  # denied to an administrator, it may be open to the system, which installs
        code = Path(directory) / "agent.zip"
        code.write_bytes(_code_of(msi))
        program = (
            f"import sys; sys.path.insert(0, {str(code)!r})\n"
            "from pathlib import Path\n"
            "from scheduled_events_agent.cli.config import load_policy\n"
            "from scheduled_events_agent.policy.load import ConfigError\n"
            f"try: load_policy(Path({str(path)!r}))\n"
            f"except ConfigError as error: print(error); sys.exit({_REFUSED})"
        )
        command = [sys.executable, "-I", "-B", "-X", "utf8", "-c", program]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8", check=False
        )
        if done.returncode == _REFUSED:
            raise _RefusedError(f"{done.stdout.strip()}\nNothing was changed: the version before runs on.")


def _code_of(msi: str) -> bytes:
    """The agent's code that an MSI carries besides its files. Raises OSError."""
    api = ctypes.CDLL("msi")  # of calling conventions there is one, in 64 bits
    handles = [ctypes.c_uint() for _ in range(3)]
    database, view, record = handles
    size = ctypes.c_uint()
    data = ctypes.create_string_buffer(0)

    def call(function: str, *arguments: object) -> None:
        if code := getattr(api, function)(*arguments):
            raise OSError(f"{function} ended with {code}")

    try:
        call("MsiOpenDatabaseW", msi, None, ctypes.byref(database))
        call("MsiDatabaseOpenViewW", database, _BINARY, ctypes.byref(view))
        call("MsiViewExecute", view, 0)
        call("MsiViewFetch", view, ctypes.byref(record))
        size.value = api.MsiRecordDataSize(record, 1)
        data = ctypes.create_string_buffer(size.value)
        call("MsiRecordReadStream", record, 1, data, ctypes.byref(size))
    finally:
        for handle in reversed(handles):
            api.MsiCloseHandle(handle)
    return data.raw[: size.value]


def _enter(policy: str) -> None:
    for stale in (_LOG, _POLICY_REPLACED):
        stale.unlink(missing_ok=True)
    _forget_bytecode()
    from scheduled_events_agent.cli.config import load_policy  # noqa: PLC0415 - as are the imports below: see above
    from scheduled_events_agent.host import default_config_path  # noqa: PLC0415
    from scheduled_events_agent.host.windows.service_manager import install, register_source  # noqa: PLC0415

    if policy:
        load_policy(Path(policy))
    install([])
    register_source(str(_HOME / "messages.dll"))
    target = default_config_path()
    if policy and target.exists():
        _copy(target, _before(target))
        _POLICY_REPLACED.touch()
    if policy or not target.exists():
        _copy(Path(policy) if policy else _HOME / "config" / "policy.yaml", target)
    _copy(_HOME / "config" / "policy.schema.json", target.with_name("policy.schema.json"))


def _undo() -> None:
    from scheduled_events_agent.host import default_config_path  # noqa: PLC0415 - see main

    if _POLICY_REPLACED.exists():
        target = default_config_path()
        os.replace(_before(target), target)  # noqa: PTH105 - Path.replace would say the same
        _POLICY_REPLACED.unlink()
    _forget_bytecode()


def _halt() -> None:
    from scheduled_events_agent.host.windows.service_manager import query, stop  # noqa: PLC0415 - see main

    _HALTED.unlink(missing_ok=True)
    facts = query()
    if facts is not None and facts.state not in ("stopped", "stop pending"):
        _HALTED.touch()
    if facts is not None:
        stop()  # which waits for hooks longer than an installer would


def _leave(*, is_purge: bool, is_upgrade: bool) -> None:
    from scheduled_events_agent.host import default_config_path  # noqa: PLC0415 - see main

    if not is_upgrade:
        with contextlib.suppress(Exception):  # it must not keep the product from being removed
            from scheduled_events_agent.cli.service import report_removal  # noqa: PLC0415 - see main

            report_removal()
    if is_purge:
        shutil.rmtree(default_config_path().parent, ignore_errors=True)
    _LOG.unlink(missing_ok=True)
    _forget_bytecode()


def _return() -> None:
    from scheduled_events_agent.host.windows.service_manager import install, start  # noqa: PLC0415 - see main

    install([])  # an installer brings back the service, but not its recovery actions and what else it has
    if _HALTED.exists():
        _HALTED.unlink()
        start()


def _before(policy: Path) -> Path:
    """Where the policy is that another one has replaced."""
    return policy.with_name(f"{policy.name}.before")


def _forget_bytecode() -> None:
    for directory in _LIB.rglob("__pycache__"):
        shutil.rmtree(directory, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    """Whole or not at all; the directory of the target says who may read it."""
    fresh = target.with_name(f"{target.name}.new")
    shutil.copyfile(source, fresh)
    os.replace(fresh, target)  # noqa: PTH105 - Path.replace would say the same


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
