"""The hook pgbouncer, with a program in psql's place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are shell scripts for Linux", allow_module_level=True)

from hook_shells import SHIPPED_HOOKS

pytestmark = pytest.mark.usefixtures("hook_shell")
HOOK = SHIPPED_HOOKS / "pgbouncer"
# psql -XAtqwx -v ON_ERROR_STOP=1 -d CONNECTION -c COMMAND; a PgBouncer is a file: there while "app" is paused.
PSQL = """#!/bin/sh
bouncer=${5%% *}
case $bouncer:$7 in
    gone:*) exit 2 ;;
    *:SHOW*) printf 'name|app\\npaused|%s\\n' "$([ ! -e "$bouncer" ]; echo $?)" ;;
    *:PAUSE*) sleep 1.1; touch "$bouncer" ;;
    *:RESUME*) rm "$bouncer" ;;
esac
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_program(tmp_path / "bin/psql", PSQL)
    return tmp_path


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def run(place: Path, *arguments: str, **more: str) -> tuple[int, list[str]]:
    variables = {
        "PATH": f"{place}/bin:{os.environ['PATH']}",
        "PGBOUNCER": "one",
        "PGBOUNCER_DATABASE": "app",
        "PGBOUNCER_MARK": "mark",
        **more,
    }
    done = subprocess.run(
        [HOOK, *arguments],
        cwd=place,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, [line.removeprefix("pgbouncer: ") for line in done.stdout.splitlines()]


def test_clients_of_one_go_on_although_another_does_not_answer(place: Path) -> None:
    for name in ("mark", "one"):
        (place / name).touch()
    assert run(place, "resume", PGBOUNCER="gone\none") == (
        *(1, ["no answer from gone", 'not resumed everywhere: RESUME "app"']),
    )
    assert not (place / "one").exists()
    assert (place / "mark").exists()  # for the next attempt


def test_each_database_has_a_mark_of_its_own(place: Path) -> None:
    write_program(place / "bin/tee", "#!/bin/sh\nexit 1\n")
    mark = "/var/lib/scheduled-events-agent/pgbouncer-app.paused-by-agent"
    assert run(place, "pause", "true", PGBOUNCER_MARK="") == (1, [f"the mark cannot be written: {mark}"])


def test_the_command_is_told_how_much_time_the_pause_has_left_it(place: Path) -> None:
    left = {"SCHEDULED_EVENT_SECONDS_LEFT": "300", "SCHEDULED_EVENT_TIMEOUT_SECONDS": "100"}
    command = 'echo "$SCHEDULED_EVENT_SECONDS_LEFT $SCHEDULED_EVENT_TIMEOUT_SECONDS"'
    code, said = run(place, "pause", "sh", "-c", command, **left)
    of_event, of_hook = (int(word) for word in said[-1].split())
    assert code == 0
    assert of_event < 300
    assert of_event - of_hook == 200


def test_a_command_that_has_no_time_left_is_told_0(place: Path) -> None:
    """Not a number below 0, which its common.sh would drop."""
    write_program(place / "bin/psql", PSQL.replace("SHOW*)", "SHOW*) sleep 2.1;").replace("sleep 1.1;", ""))
    code, said = run(
        place, "pause", "sh", "-c", 'echo "$SCHEDULED_EVENT_TIMEOUT_SECONDS"', SCHEDULED_EVENT_TIMEOUT_SECONDS="3"
    )
    assert (code, said[-1]) == (0, "0")
