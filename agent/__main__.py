"""``python -m agent`` is ``scheduled-events-agent``."""

import sys

from agent.cli import main

sys.exit(main())
