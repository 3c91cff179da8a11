"""The differences between Linux and Windows, and nothing else. ``processes`` has the parts that load slowly.

The two packages define the same functions with the same signatures. They know nothing of events, policy or hooks.
From the agent they import only its base error.
"""

import sys

from scheduled_events_agent.host.colors import has_terminal_colors as has_terminal_colors
from scheduled_events_agent.host.error import HostError as HostError
from scheduled_events_agent.host.small_files import read_small_file as read_small_file
from scheduled_events_agent.host.small_files import read_trusted_file as read_trusted_file

if sys.platform == "win32":
    from scheduled_events_agent.host.windows.files import *  # noqa: F403
    from scheduled_events_agent.host.windows.system import *  # noqa: F403
    from scheduled_events_agent.host.windows.wakeup import *  # noqa: F403
else:
    from scheduled_events_agent.host.linux.files import *  # noqa: F403
    from scheduled_events_agent.host.linux.service_manager import *  # noqa: F403
    from scheduled_events_agent.host.linux.wakeup import *  # noqa: F403
