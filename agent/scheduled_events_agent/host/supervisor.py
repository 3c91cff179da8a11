"""Commands for the agent's service, to be shown to people."""

from typing import NamedTuple


class SupervisorCommands(NamedTuple):
    """Command lines of this system."""

    prefix: str
    """The prefix of a command for an account without privileges, such as sudo and a blank."""
    status: str
    start: str
    reload: str
    log: str
