"""Linux behind the seam: the names in ``__all__`` of each module."""

from agent.host.linux.files import *  # noqa: F403
from agent.host.linux.process import *  # noqa: F403
from agent.host.linux.service import *  # noqa: F403
from agent.host.linux.units import *  # noqa: F403
