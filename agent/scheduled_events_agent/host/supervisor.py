"""What a person types to find out why the agent does not answer."""

from typing import NamedTuple


class SupervisorCommands(NamedTuple):
    """Command lines of this system."""

    prefix: str
    """What an account without privileges puts before a command of the agent, such as sudo and a blank."""
    status: str
    start: str
    reload: str
    log: str
