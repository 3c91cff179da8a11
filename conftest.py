"""Every test: what it leaves behind is cleared or a failure."""

pytest_plugins = ["leftovers"]
