"""The pages that have a reader run an agent of her own, beside the installed one."""

import re
from pathlib import Path

import pytest
import yaml

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", ["simulator.md", "tutorial.md"])
def test_a_trial_agent_and_an_installed_one_share_nothing(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    (agent,) = re.findall(r"^agent: (\{.*?\})", text, re.MULTILINE)
    tried = yaml.safe_load(agent)
    assert tried["listen"] == "127.0.0.1:9770"
    assert tried["state_dir"] in ("/srv/try/state", "$PWD/state")
    looks = re.findall(r"(?:^\$ |`)scheduled-events-agent (?:run|status|history|retry)\b.*", text, re.MULTILINE)
    assert looks
    assert [command for command in looks if "--config" not in command] == []
    assert "http://127.0.0.1:9770/" in text
    assert "http://127.0.0.1:9769" not in text
