"""An agent for the benchmarks and the soak: its policy, its files and how it is started."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from benchmarks.process import Program

_PATIENCE_SECONDS = 60.0


class Agent:
    """An agent of one VM, in a directory of its own."""

    def __init__(
        self,
        directory: Path,
        cache: Path,
        imds: Mapping[str, object],
        rules: Sequence[Mapping[str, Any]],
        hooks: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """``cache`` keeps the compiled modules; ``imds``, ``rules`` and ``hooks`` are parts of its policy."""
        self.directory = directory
        self.state_dir = directory / "state"
        self.log = directory / "agent.log"
        self._cache = cache
        self._policy_file = directory / "policy.yaml"
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._address = f"127.0.0.1:{listener.getsockname()[1]}"
        self._policy = {
            "imds": imds,
            "agent": {"listen": self._address, "log": {"format": "json"}},
            "rules": rules,
            "hooks": hooks,
        }
        self.write_policy()

    def write_policy(self, **parts: object) -> None:
        """Write the policy, with other ``parts`` if they are given."""
        self._policy_file.write_text(json.dumps({**self._policy, **parts}), encoding="utf-8")  # JSON is YAML

    def start(self) -> Program:
        """As it is installed."""
        arguments = ["run", "--config", str(self._policy_file), "--state-dir", str(self.state_dir)]
        return Program(["-m", "agent", *arguments], self.log, self._cache)

    def start_fast(self, interval_seconds: float, *more: float) -> Program:
        """At a pace that no policy file allows; see ``fast_agent``."""
        arguments = [str(self._policy_file), str(self.state_dir), *map(str, (interval_seconds, *more))]
        return Program(["-m", "benchmarks.fast_agent", *arguments], self.log, self._cache)

    def get(self, page: str) -> str:
        """A page of its web server."""
        return fetch(f"http://{self._address}{page}")


def fetch(url: str) -> str:
    """Fetch a page, which may say 503: it is not ready."""
    try:
        with urllib.request.urlopen(url, timeout=_PATIENCE_SECONDS) as answer:
            text: str = answer.read().decode()
            return text
    except urllib.error.HTTPError as refusal:
        with refusal:
            text = refusal.read().decode(errors="replace")
        if refusal.code != HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        return text
