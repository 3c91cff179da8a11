"""What a unit wrote, read from the journal."""

import json
import subprocess
import time
from collections.abc import Mapping
from typing import Any

_LINES = 1000
_SECONDS = 1.0
_PAUSE_SECONDS = 0.02
# MESSAGE_ID of what systemd says last of a run: "Deactivated successfully" or "Failed with result".
_LAST_WORDS = ("7ad2d189f7e94e70a38c781354912448", "d9b373ed55a64feb8242e02dbe79a49c")


def read_journal(name: str, since: int, invocation: str) -> bytes:
    """The last lines that the unit wrote, and what systemd said about it; or why they cannot be read.

    ``since``: microseconds on the monotonic clock; ``invocation``: the id of the run, empty if there was none.
    """
    command = ["journalctl", "--quiet", "--no-pager", "--all", "--output=json", f"--lines={_LINES}"]
    # The journal knows the unit's name of every line, but not always the run: a last line without a newline lacks
    # it, and one of a process that is gone. And some sandboxes hide which boot this is.
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
        of_run = [entry for entry in found if not invocation or entry.get("INVOCATION_ID") == invocation]
        is_told = not invocation or any(entry.get("MESSAGE_ID") in _LAST_WORDS for entry in of_run)
        boot = of_run[-1].get("_BOOT_ID") if of_run else None
        entries = [
            entry
            for entry in found
            if entry.get("_BOOT_ID") == boot and int(entry.get("__MONOTONIC_TIMESTAMP", 0)) >= since
        ]
        if (is_told and entries == before) or done.returncode != 0 or time.monotonic() >= give_up_at:
            break
        before = entries
        time.sleep(_PAUSE_SECONDS)
    if invocation and not entries:
        return (
            b"(its output cannot be read: the journal shows nothing of it to this account; the group "
            b"systemd-journal may read it)\n"
        )
    return b"".join(_message(entry) + b"\n" for entry in entries)


def _message(entry: Mapping[str, Any]) -> bytes:
    message = entry.get("MESSAGE")
    if isinstance(message, list):  # a message that is no text comes as numbers
        return bytes(value for value in message if isinstance(value, int))
    return str(message or "").encode("utf-8", "replace")
