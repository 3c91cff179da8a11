"""The JSON schema of the policy file, for editors."""

from typing import Any

from agent.settings.model import Settings
from agent.typed_yaml import json_schema


def policy_schema() -> dict[str, Any]:
    """The JSON schema of the policy file, for editors."""
    schema = json_schema(Settings)
    hook = schema["$defs"]["Hook"]
    hook["oneOf"] = [{"required": ["run"]}, {"required": ["shell"]}, {"required": ["unit"]}]
    hook["dependentSchemas"] = {"unit": {"not": {"anyOf": [{"required": ["user"]}, {"required": ["cwd"]}]}}}
    return {"title": "Policy of scheduled-events-agent", **schema}
