"""Windows behind the seam: the names in ``__all__`` of each module."""

from agent.host.windows.files import *  # noqa: F403
from agent.host.windows.process import *  # noqa: F403
from agent.host.windows.service import *  # noqa: F403
from agent.host.windows.system import *  # noqa: F403
