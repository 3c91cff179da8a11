"""Functions that differ between the systems and import psutil: hooks, other programs, the own service, disks.

They are not in ``scheduled_events_agent.host`` because psutil takes longer to load than Python itself.
"""

import sys

if sys.platform == "win32":
    from scheduled_events_agent.host.windows.files import file_system, find_access_error, temporary_disk  # noqa: F401
    from scheduled_events_agent.host.windows.processes import *  # noqa: F403
    from scheduled_events_agent.host.windows.service_manager import is_of_own_service, own_service  # noqa: F401
    from scheduled_events_agent.host.windows.system import is_shutting_down, other_approvers, unknown_units  # noqa: F401
else:
    from scheduled_events_agent.host.linux.processes import *  # noqa: F403
    from scheduled_events_agent.host.linux.system import *  # noqa: F403
