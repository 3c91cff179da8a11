"""Whether terminals show colours."""

import os
import sys


def has_terminal_colors() -> bool:
    """Whether terminals show the usual colours by default, and NO_COLOR and TERM=dumb do not switch them off."""
    if sys.platform == "win32":
        return False
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
