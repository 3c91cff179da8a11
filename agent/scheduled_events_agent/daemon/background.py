"""Work on a thread of its own, whose end by a bug ends nothing else."""

import threading
from collections.abc import Callable

from scheduled_events_agent.telemetry.log import get_logger
from scheduled_events_agent.telemetry.log_ids import LogId


def run_in_background(
    work: Callable[[], None], name: str, on_failure: Callable[[str, str], None] = lambda *_: None
) -> None:
    """Run the work on a thread of that name. A bug in it is logged.

    ``on_failure`` gets a kind and a reason if the thread ends by a bug, or cannot start.
    """

    def guarded() -> None:
        try:
            work()
        # A workflow would wait for ever, and a traceback that Python prints itself tears a line of the log apart.
        except BaseException as error:  # noqa: BLE001
            get_logger().exception("a bug in the agent", log_id=LogId.AGENT_FAILED)
            on_failure("bug", f"a bug in the agent: {error!r}")

    try:
        threading.Thread(target=guarded, name=name, daemon=True).start()
    except RuntimeError as error:  # no memory for a thread
        on_failure("no_thread", str(error))
