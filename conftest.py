"""Every test: what it leaves behind is cleared or a failure. Generated inputs are the same in every run."""

from hypothesis import HealthCheck, settings

pytest_plugins = ["leftovers"]

# A busy machine is no failure.
_patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _patient, derandomize=True)
settings.register_profile("nightly", _patient, max_examples=2000)
settings.load_profile("same")
