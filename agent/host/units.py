"""What differs of services: hooks that are units of systemd, and the agent's own service.

Apart from ``agent.host.processes``, as D-Bus takes a while to load, and most policies name no unit.
"""

import sys

__all__ = ["own_service", "start_unit", "unit_fault"]

if sys.platform == "win32":
    from agent.host.windows.service import own_service
    from agent.host.windows.system import start_unit, unit_fault
else:
    from agent.host.linux.units import own_service, start_unit, unit_fault
