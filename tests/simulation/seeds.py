"""Which seeds the command lives: others with each commit, and always those that have ever failed."""

import subprocess
from pathlib import Path

FAILED_SEEDS: tuple[int, ...] = (217773675, 310008735)
"""Lives of one VM that have shown a fault, of the agent or of the oracle."""
FAILED_FLEET_SEEDS: tuple[int, ...] = (
    139,
    800023,
    800043,
    800083,
    800100,
    810229,
    810274,
    7000055,
    7000092,
    80087138,
    154977837,
)
_HEX_DIGITS = 7


def first_seed(commit: str) -> int:
    """The first seed of a commit, so that each commit lives worlds of its own; 0 without a commit."""
    return int(commit[:_HEX_DIGITS] or "0", 16)


def current_commit() -> str:
    """The commit of the sources; "" if they are in no repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
