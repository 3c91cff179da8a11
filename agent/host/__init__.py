"""What differs between Linux and Windows, and nothing else; ``processes`` has what takes long to load.

The two packages define what the agent uses of them with the same signatures. They know nothing of events, policy
or hooks, and import nothing of the agent but its base error.
"""

import sys

from agent.host.error import HostError as HostError

if sys.platform == "win32":
    from agent.host.windows.files import *  # noqa: F403
    from agent.host.windows.system import *  # noqa: F403
    from agent.host.windows.waking import *  # noqa: F403
else:
    from agent.host.linux.files import *  # noqa: F403
    from agent.host.linux.service import *  # noqa: F403
    from agent.host.linux.waking import *  # noqa: F403
