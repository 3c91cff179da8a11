"""The last line of a shipped hook names the cause that was found, and the seconds that have passed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("the hooks in sh are for Linux", allow_module_level=True)

from hook_machine import run_hook
from hook_shells import SHIPPED_HOOKS

pytestmark = pytest.mark.usefixtures("hook_shell")

NO_LOGIN = "echo 'psql: error: FATAL:  role \"a\" is not permitted to log in' >&2; exit 2"
NO_ADMIN = """case $* in
*SHOW*) printf 'name|app\\npaused|0\\n' ;;
*PAUSE*) echo 'ERROR: no admin' >&2; exit 1 ;;
esac"""
NO_SENTINEL = """case $* in
*SENTINEL*) echo 'Could not connect: refused' >&2; exit 1 ;;
*) echo role:master ;;
esac"""
NO_SERVER = "echo 'Could not connect: refused' >&2; exit 1"
NO_RIGHT = """case $1 in
show) printf 'LoadState=loaded\\nActiveState=active\\n' ;;
stop) echo 'Access denied' >&2; exit 4 ;;
esac"""
REFUSED = "Could not connect: refused (after N s); nothing was stopped"
CASES: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "a role that may not connect": (
        ("postgresql-prepare", "checkpoint"),
        {"psql": NO_LOGIN},
        'no checkpoint: psql: error: FATAL:  role "a" is not permitted to log in (after N s)',
    ),
    "a unit that cannot be started": (
        ("postgresql-recover",),
        {},
        "postgresql.service does not start: no start succeeds (after N s); see its journal",
    ),
    "no Sentinel": (
        ("redis-prepare",),
        {"redis-cli": NO_SENTINEL},
        f"the Sentinel at 127.0.0.1:26379 does not know mymaster (REDIS_SENTINEL, REDIS_NAME): {REFUSED}",
    ),
    "no Redis": (
        ("redis-prepare",),
        {"redis-cli": NO_SERVER},
        f"the server at 127.0.0.1:6379 does not answer: {REFUSED}",
    ),
    "no right to stop": (
        ("service", "stop"),
        {"systemctl": NO_RIGHT},
        "web.service has not stopped: Access denied (after N s)",
    ),
    "no administrator of PgBouncer": (
        ("pgbouncer", "pause", "true"),
        {"psql": NO_ADMIN},
        "PAUSE at one: ERROR: no admin (after N s); clients go on",
    ),
    "a drain that fails": (
        ("rabbitmq-prepare",),
        {"rabbitmqctl": "echo false", "rabbitmq-upgrade": "[ $2 = revive ] || { echo no quorum >&2; exit 69; }"},
        "not drained: no quorum (after N s); nothing was stopped",
    ),
}


@pytest.mark.parametrize(("call", "programs", "line"), CASES.values(), ids=CASES)
def test_the_last_line_names_the_cause(
    tmp_path: Path, call: tuple[str, ...], programs: dict[str, str], line: str
) -> None:
    said = run_hook(tmp_path, call, programs=programs).said
    pattern = re.escape(line).replace(r"after\ N\ s", "after [0-9]{1,2} s")
    assert re.fullmatch(f"{call[0]}: {pattern}", said[-1])


def test_what_is_not_done_in_its_time_is_said_to_be_so() -> None:
    script = f'set -eu; . "{SHIPPED_HOOKS}/common.sh"; try timeout 1 sleep 60 || echo "$why"'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"not done after [1-9][0-9]* s\n", done.stdout)
