"""A service that works off a queue: four jobs at a time, of 3 s each; it notes when one begins and ends.

worker.py DIRECTORY; while there is a file "drain" it begins none, and without a job there is a file "idle".
SIGTERM ends it at once, as it does most programs.
"""

import sys
import threading
import time
from pathlib import Path

place = Path(sys.argv[1])
lock = threading.Lock()
at_work = 0


def may_begin() -> bool:
    global at_work  # noqa: PLW0603 - it is the whole state of a small program
    with lock:
        if (place / "drain").exists():
            return False
        (place / "idle").unlink(missing_ok=True)
        at_work += 1
        note("begins")
        return True


def end() -> None:
    global at_work  # noqa: PLW0603
    with lock:
        at_work -= 1
        note("ends")
        if at_work == 0:
            (place / "idle").touch()


def note(what: str) -> None:
    with (place / "notes").open("a") as notes:
        notes.write(f"{time.time()} {what}\n")


def work() -> None:
    while True:
        if may_begin():
            time.sleep(3)
            end()
        else:
            time.sleep(0.05)


for _ in range(4):
    threading.Thread(target=work).start()
