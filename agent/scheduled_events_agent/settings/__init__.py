"""The policy file: YAML to frozen Settings, every error at once with its line.

Decides nothing about events.

    load.py    where the file is, and how it is read
    model.py   what it may say
    checks.py  what is wrong or doubtful in it
    schema.py  the same for editors
"""

from scheduled_events_agent.settings.load import (
    BUILT_IN_NAME,
    CONFIG_VARIABLE,
    ConfigError,
    Inspected,
    Loaded,
    PolicyFile,
    find_config,
    inspect_policy,
    keys_for_next_start,
    load_policy,
    load_settings,
    parse_settings,
    state_dir_of,
)
from scheduled_events_agent.settings.model import (
    DEFAULT_RULES,
    AgentSettings,
    FleetSettings,
    ImdsSettings,
    LogFormat,
    LogLevel,
    LogSettings,
    NotifyTarget,
    Settings,
    VmSettings,
    parse_endpoint,
)

__all__ = [
    "BUILT_IN_NAME", "CONFIG_VARIABLE", "DEFAULT_RULES", "AgentSettings", "ConfigError", "FleetSettings",
    "ImdsSettings", "Inspected", "Loaded", "LogFormat", "LogLevel", "LogSettings", "NotifyTarget", "PolicyFile",
    "Settings", "VmSettings", "find_config", "inspect_policy", "keys_for_next_start", "load_policy",
    "load_settings", "parse_endpoint", "parse_settings", "state_dir_of",
]  # fmt: skip
