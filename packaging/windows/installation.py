"""What the installer does besides placing files: it runs this, as the system, with the Python that it carries.

    python.exe -I -B installation.py enter "POLICY"    files and service are there, and the service may start next
    python.exe -I -B installation.py undo              the installation failed after that
    python.exe -I -B installation.py leave "PURGE"     before the service and the files go

Owns what tables of an MSI cannot say. How the service is set up is not decided here but by the agent's own
`service install`. The one invariant: a policy file that the agent would refuse replaces nothing.

An installer hears of a program nothing but its exit code: what went wrong is told in install.log beside this file.
"""  # noqa: INP001 - a script

import compileall
import os
import shutil
import sys
import traceback
from pathlib import Path

_HOME = Path(__file__).parent
_LIB = _HOME / "lib"
_LOG = _HOME / "install.log"


def main(arguments: list[str]) -> int:
    """Do what the first argument says; returns the exit code."""
    action, argument = (*arguments, "")[:2]
    try:
        if action == "enter":
            _enter(argument)
        elif action == "leave":
            _leave(is_purge=argument == "1")
        else:
            _forget_bytecode()
    except Exception as error:  # noqa: BLE001 - the exit code says so, and the file why
        from agent import AgentError  # noqa: PLC0415 - not before what was left of another version is gone

        told = str(error) if isinstance(error, AgentError) else traceback.format_exc()
        _LOG.write_text(f"installation.py {action}: {told.rstrip()}\n", encoding="utf-8")
        return 1
    _LOG.unlink(missing_ok=True)
    return 0


def _enter(policy: str) -> None:
    _forget_bytecode()
    from agent.config import load_policy  # noqa: PLC0415 - as are the imports below: see above
    from agent.host import default_config_path  # noqa: PLC0415
    from agent.host.windows_events import register_source  # noqa: PLC0415
    from agent.host.windows_service import install  # noqa: PLC0415

    if policy:
        load_policy(Path(policy))
    install([], None)
    register_source(str(_HOME / "messages.dll"))
    target = default_config_path()
    if policy and target.exists():
        _copy(target, target.with_name("policy.yaml.before"))
    if policy or not target.exists():
        _copy(Path(policy) if policy else _HOME / "config" / "policy.yaml", target)
    _copy(_HOME / "config" / "policy.schema.json", target.with_name("policy.schema.json"))
    # Never what an earlier version left: all files of a build have the same time, so that times tell nothing.
    compileall.compile_dir(_LIB, quiet=2, force=True)


def _leave(*, is_purge: bool) -> None:
    from agent.host import default_config_path  # noqa: PLC0415 - see main
    from agent.host.windows_service import query, stop  # noqa: PLC0415

    if query() is not None:
        stop()  # which waits for hooks longer than an installer would
    if is_purge:
        shutil.rmtree(default_config_path().parent, ignore_errors=True)
    _forget_bytecode()


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
