"""Every test: what it leaves behind is cleared or a failure. Generated inputs are the same in every run."""

import os
import sys

from hypothesis import HealthCheck, settings

# Where the environment forbids bytecode, each worker and each agent would compile everything again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Commands that are printed begin with sudo if it started the process.
os.environ.pop("SUDO_USER", None)

pytest_plugins = ["leak_checks", "agents", "own_places", *(["hook_shells"] if sys.platform == "linux" else [])]

# A busy machine is no failure.
_patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _patient, derandomize=True, max_examples=25)
settings.register_profile("nightly", _patient, max_examples=2000)
settings.load_profile("same")
