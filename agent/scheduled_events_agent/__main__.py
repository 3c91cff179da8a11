"""``python -m scheduled_events_agent`` is ``scheduled-events-agent``."""

import sys

from scheduled_events_agent.cli import main

sys.exit(main())
