"""The operator's policy: its rules, and the decision that they lead to. Pure: reads no file and no clock.

rules.py       types of a policy's rules, hooks and maintenance windows
decide.py      (rules, event, context) -> Decision with a reason
settings.py    types of the other keys of the policy file
load.py        the policy file's text -> Settings, every error with its line
web_config.py  the file of agent.web_config
checks.py      errors and warnings beyond the types
schema.py      the JSON schema
durations.py   how people write durations, times and numbers
typed_yaml.py  YAML text -> frozen values along their types
yaml_nodes.py  YAML text -> nodes, syntax errors in plain words
"""

from scheduled_events_agent.policy.decide import (
    Decision,
    MatchContext,
    StartTime,
    decide,
    drain_seconds,
    notice_seconds,
    promised_times,
    rejected_rules,
    why_conditions_fail,
    why_event_fails,
)
from scheduled_events_agent.policy.rules import (
    ApproveMode,
    Hook,
    MaintenanceWindow,
    Rule,
    RuleAffects,
    When,
    is_secret_name,
    matches_glob,
    names_recommendations,
)

__all__ = [
    "ApproveMode",
    "Decision",
    "Hook",
    "MaintenanceWindow",
    "MatchContext",
    "Rule",
    "RuleAffects",
    "StartTime",
    "When",
    "decide",
    "drain_seconds",
    "is_secret_name",
    "matches_glob",
    "names_recommendations",
    "notice_seconds",
    "promised_times",
    "rejected_rules",
    "why_conditions_fail",
    "why_event_fails",
]  # fmt: skip
