"""Linux behind the seam: the public functions of these modules."""

from agent.host.linux.files import *  # noqa: F403
from agent.host.linux.process import *  # noqa: F403
from agent.host.linux.service import *  # noqa: F403
from agent.host.linux.units import start_unit as start_unit
from agent.host.linux.units import unit_fault as unit_fault
