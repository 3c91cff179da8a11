"""A hook for tests: notes its start with all it was given, waits, notes its end.

hook.py GIVE_UP_FILE NOTES_FILE NAME SECONDS UNTIL_FILE EXIT_CODE IGNORES_SIGTERM
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

give_up, notes, name, seconds, until, exit_code, ignores_sigterm = sys.argv[1:]


def note(what: str, **more: object) -> None:
    line = json.dumps({"hook": name, "what": what, "monotonic": time.monotonic(), "pid": os.getpid(), **more})
    # In one write at the end of the file, for other hooks write there too. The line before may have been cut off.
    descriptor = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


if ignores_sigterm == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
prefix = "SCHEDULED_EVENT_"
given = {key.removeprefix(prefix): value for key, value in os.environ.items() if key.startswith(prefix)}
text = sys.stdin.buffer.read()
note("start", given=given, event=json.loads(text) if text else None)
print(f"{name} works")
# A hook that waits does so for longer than any test: it hangs unless it is ended.
deadline = time.monotonic() + (float(seconds) or (300.0 if until else 0.0))
while time.monotonic() < deadline and not (until and Path(until).exists()):
    if Path(give_up).exists():  # the test is over
        sys.exit(99)
    time.sleep(0.01)
note("end")
sys.exit(int(exit_code))
