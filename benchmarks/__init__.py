"""Speed and size of the agent beside bare loops, and (soak.py) whether it grows.

No timed test, and nothing in the agent knows of it. Linux only.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "e2e"))  # harness.py
