"""What a unit wrote, read from the journal."""

import subprocess
import time

_LINES = 1000
_SECONDS = 1.0
_PAUSE_SECONDS = 0.05
# What systemd says last of a run, in its newer and its older versions.
_LAST_WORDS = (b": Deactivated successfully.", b": Failed with result ", b": Succeeded.")
_NOTHING = (
    b"(its output cannot be read: the journal shows nothing of it to this account; the group systemd-journal may "
    b"read it)\n"
)


def read_journal(name: str, since_unix: float, *, has_run: bool) -> bytes:
    """The last lines that the unit wrote, and what systemd said about it; or why they cannot be read."""
    command = ["journalctl", "--quiet", "--no-pager", "--all", "--output=cat", f"--lines={_LINES}"]
    # Not by the run: a last line without a newline does not name it, nor does one of a process that is gone.
    command += [f"--since=@{since_unix:.6f}", f"_SYSTEMD_UNIT={name}", "+", "_PID=1", f"UNIT={name}"]
    give_up_at = time.monotonic() + _SECONDS
    before: bytes | None = None
    while True:
        # Lines take their time to get into the journal, each sender's on their own. It is complete when systemd's
        # last words about the unit are there, and nothing is added any more.
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            return f"(its output cannot be read: {error})\n".encode()
        is_complete = done.stdout == before and (not has_run or any(text in before for text in _LAST_WORDS))
        if is_complete or done.returncode != 0 or time.monotonic() >= give_up_at:
            return done.stdout or (_NOTHING if has_run else b"")
        before = done.stdout
        time.sleep(_PAUSE_SECONDS)
