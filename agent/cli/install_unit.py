"""``install-unit``: supervision by systemd for an agent that pip or pipx installed; the strict set-up for any."""

import argparse

from agent import AgentError, host
from agent.host import processes, systemd_unit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``install-unit``."""
    parser.description = (
        "Writes the systemd unit for the place where this program is installed, makes the agent's directories "
        "under /etc, and enables the unit. An agent that a package installed has its unit already: then only the "
        "files of the strict set-up come and go. Run again, it changes only what has to change. A file that "
        "it did not write is not replaced."
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="the agent gets an account without privileges; without this option it runs as root",
    )
    parser.add_argument("--now", action="store_true", help="start the agent, or restart it if anything changed")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--print", action="store_true", help="print what would be written, and touch nothing")
    what.add_argument(
        "--remove", action="store_true", help="stop and disable the agent, and remove only what was written"
    )
    parser.set_defaults(handler=_install_unit)


def _install_unit(arguments: argparse.Namespace) -> int:
    processes.find_systemctl()  # first of all: where there is no systemd, nothing else makes sense
    if arguments.remove and (arguments.strict or arguments.now):
        raise AgentError("--remove goes with neither --strict nor --now", kind="usage")
    place = systemd_unit.find_place()
    units = _units() if arguments.strict else []
    if arguments.print:
        for path, text in systemd_unit.files_of(place, units, is_strict=arguments.strict).items():
            print(f"# no file {path}" if text is None else f"# file {path}\n{text}")
        return 0
    if host.account_name() != "root":
        raise AgentError("only root can install a unit: use sudo, or see with --print what would be written")
    if arguments.remove:
        print(*(systemd_unit.remove(place) or ["there is nothing of install-unit to remove"]), sep="\n")
        left = f"{systemd_unit.ETC}, {systemd_unit.STATE} and the account {systemd_unit.USER}"
        print(f"not touched, if they are there: {left}")
        return 0
    systemd_unit.check_place(place)
    done = systemd_unit.install(place, units, is_strict=arguments.strict, is_now=arguments.now)
    print(*(done or ["nothing to do: all is as it should be"]), sep="\n")
    return 0


def _units() -> list[str]:
    return []
