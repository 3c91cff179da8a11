"""Commands for the agent's service, to be shown to people, and where systemd keeps its units."""

from typing import NamedTuple

UNIT_PLACES = ("etc/systemd/system", "run/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")


class SupervisorCommands(NamedTuple):
    """Command lines of this system."""

    prefix: str
    """The prefix of a command for an account without privileges, such as sudo and a blank."""
    status: str
    start: str
    restart: str
    reload: str
    enable: str
    """Has the service started with the machine."""
    log: str
