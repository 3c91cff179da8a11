"""What a unit wrote, read from the journal."""

import json
import subprocess
import time
from typing import Any

_LINES = 1000
_SECONDS = 1.0
_PAUSE_SECONDS = 0.02
# MESSAGE_ID of what systemd says last of a run: "Deactivated successfully" or "Failed with result".
_LAST_WORDS = ("7ad2d189f7e94e70a38c781354912448", "d9b373ed55a64feb8242e02dbe79a49c")
_NOTHING = (
    b"(its output cannot be read: the journal shows nothing of it to this account; the group systemd-journal may "
    b"read it)\n"
)


def read_journal(name: str, since: int, invocation: str) -> bytes:
    """The last lines that the unit wrote, and what systemd said about it; or why they cannot be read.

    ``since``: microseconds on the monotonic clock; ``invocation``: the id of the run, empty if there was none.
    """
    command = ["journalctl", "--quiet", "--no-pager", "--all", "--output=json", f"--lines={_LINES}"]
    # The journal knows the unit's name of every line, but not always the run: a last line without a newline lacks
    # it, and one of a process that is gone. Some sandboxes hide which boot this is: it is that of the newest line.
    command += ["--output-fields=MESSAGE,MESSAGE_ID,INVOCATION_ID,_BOOT_ID"]
    command += [f"_SYSTEMD_UNIT={name}", "+", "_PID=1", f"UNIT={name}"]
    give_up_at = time.monotonic() + _SECONDS
    before: list[dict[str, Any]] | None = None
    while True:
        # Lines take their time to get into the journal, each sender's on their own. It is complete when systemd's
        # last words about the unit are there, and nothing is added any more.
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False
            )
            found = [json.loads(line) for line in done.stdout.splitlines()]
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return f"(its output cannot be read: {error})\n".encode()
        entries = [
            entry
            for entry in found
            if entry["_BOOT_ID"] == found[-1]["_BOOT_ID"] and int(entry["__MONOTONIC_TIMESTAMP"]) >= since
        ]
        last_words = {entry.get("INVOCATION_ID") for entry in entries if entry.get("MESSAGE_ID") in _LAST_WORDS}
        is_complete = entries == before and (not invocation or invocation in last_words)
        if is_complete or done.returncode != 0 or time.monotonic() >= give_up_at:
            break
        before = entries
        time.sleep(_PAUSE_SECONDS)
    if invocation and not entries:
        return _NOTHING
    return b"".join(_text(entry.get("MESSAGE")) + b"\n" for entry in entries)


def _text(message: str | list[int] | None) -> bytes:
    # A message that is no text comes as numbers.
    return bytes(message) if isinstance(message, list) else (message or "").encode("utf-8", "replace")
