"""``install-unit``: supervision by systemd for an agent that pip or pipx installed; the strict set-up for any."""

import argparse
import sys
from typing import TYPE_CHECKING

from agent import AgentError

if TYPE_CHECKING:
    from agent.host.systemd_unit import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``install-unit``."""
    parser.description = (
        "Writes the systemd unit for the place where this program is installed, makes the agent's directories "
        "under /etc, and enables the unit. An agent that a package installed has its unit already: then only the "
        "files of the strict set-up come and go. Run again, it changes only what has to change. A file that was "
        "edited is not replaced."
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="the agent gets an account without privileges, which may start the units that hooks of the policy "
        "name (unit: NAME.service), and nothing else; without this option it runs as root",
    )
    parser.add_argument("--now", action="store_true", help="start the agent, or restart it if anything changed")
    parser.add_argument("--force", action="store_true", help="replace or remove files that were edited, too")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--print", action="store_true", help="print what would be written, and touch nothing")
    what.add_argument(
        "--remove", action="store_true", help="stop and disable the agent and remove what was written, no more"
    )
    parser.set_defaults(handler=_install_unit)


def _install_unit(arguments: argparse.Namespace) -> int:
    from agent import host  # noqa: PLC0415 - as are the imports below: only this command needs them

    host.find_systemctl()  # first of all: where there is no systemd, nothing else makes sense
    from agent.host import systemd_unit  # noqa: PLC0415

    if arguments.remove and (arguments.strict or arguments.now):
        raise AgentError("--remove goes with neither --strict nor --now", kind="usage")
    place = systemd_unit.find_place()
    if not arguments.print and host.account_name() != "root":
        raise AgentError("only root can install a unit: use sudo, or see with --print what would be written")
    if arguments.remove:
        done = systemd_unit.remove(place, is_forced=arguments.force)
        for line in done or ["there is nothing of install-unit to remove"]:
            print(line)
        left = f"{systemd_unit.ETC}, {systemd_unit.STATE} and the account {systemd_unit.USER}"
        print(f"not touched, if they are there: {left}")
        return 0
    plan = systemd_unit.plan_unit(place, _units() if arguments.strict else (), is_strict=arguments.strict)
    if arguments.print:
        try:
            systemd_unit.check_place(place, is_strict=arguments.strict)
        except systemd_unit.UnitError as error:
            print(f"would be refused: {error}", file=sys.stderr)
        print(_text_of(plan), end="")
        return 0
    systemd_unit.check_place(place, is_strict=arguments.strict)
    done = systemd_unit.install(plan, is_now=arguments.now, is_forced=arguments.force)
    for line in done or ["nothing to do: all is as it should be"]:
        print(line)
    if systemd_unit.is_polkit_missing(plan):
        print(
            "there is no polkit here: until it is installed, hooks that are units cannot be started",
            file=sys.stderr,
        )
    return 0


def _units() -> list[str]:
    """The units that hooks of the policy name: the policy that the service will read, whoever runs this."""
    from agent import host  # noqa: PLC0415 - as above
    from agent.settings import load_settings  # noqa: PLC0415

    path = host.default_config_path()
    settings = load_settings(path if path.exists() else None)
    return [hook.unit for hook in settings.hooks.values() if hook.unit is not None]


def _text_of(plan: "Plan") -> str:
    texts = [f"# directory {path}, mode {mode:04o}\n" for path, mode in plan.directories]
    texts += [f"# account {plan.account}"] if plan.account else []
    for file in plan.files:
        remark = ", unless there is one" if file.is_seed else ""
        texts.append(f"# file {file.path}{remark}\n{file.text}")
    texts += [f"# no file {path}\n" for path in plan.obsolete]
    return "\n".join(texts)
