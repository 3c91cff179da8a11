"""Windows behind the seam: the public functions of these modules."""

from agent.host.windows.files import *  # noqa: F403
from agent.host.windows.process import *  # noqa: F403
from agent.host.windows.service import own_service as own_service
from agent.host.windows.system import *  # noqa: F403
