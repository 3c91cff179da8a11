"""Speed and size of the agent beside bare loops, and (soak.py) whether it grows. Linux only."""

import os
import sys
from pathlib import Path

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as installed, no module is compiled again
sys.path.append(str(Path(__file__).parents[1] / "tests" / "e2e"))  # harness.py
