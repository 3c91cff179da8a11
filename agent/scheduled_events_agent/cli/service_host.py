"""The agent inside the Windows service: its log, its daemon and its exit code."""

import sys
from functools import partial

from scheduled_events_agent import AgentError
from scheduled_events_agent.cli.run import SWITCH_SECONDS, open_daemon
from scheduled_events_agent.host.windows.event_log import EventLog, directory_fault, open_log_file
from scheduled_events_agent.host.windows.files import log_dir
from scheduled_events_agent.host.windows.service_manager import STOP_TIMEOUT
from scheduled_events_agent.host.windows.service_process import Service
from scheduled_events_agent.telemetry.log import get_logger, set_up
from scheduled_events_agent.telemetry.log_ids import LogId


def run_agent(config: str | None, state_dir: str | None, service: Service, left: str) -> int:
    """Run the daemon; returns the service's exit code. Each failure is in the log then.

    ``left``: the stacks that an earlier agent process wrote when it crashed or hung.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    events = EventLog()
    set_up_log = partial(set_up, stream=open_log_file(log_dir()), on_entry=events.report)
    set_up_log("info", "auto")
    log = get_logger()
    if fault := directory_fault(log_dir()):
        log.warning("the log file is not written", log_id=LogId.LOG_FILE_REFUSED, reason=fault)
    if left:
        log.error("the previous agent process crashed or hung", log_id=LogId.AGENT_FAILED, crash_log=left)
    try:
        with open_daemon(
            config=config,
            state_dir=state_dir,
            is_observing=False,
            stop_timeout=STOP_TIMEOUT,
            set_up_log=set_up_log,
            service=service,
        ) as daemon:
            service.attach(daemon.stop, daemon.reload)
            daemon.run()
    except AgentError as error:
        is_refused = error.kind in ("config", "usage")
        text = "the policy file is rejected; the agent does not start" if is_refused else "the agent failed"
        log_id = LogId.POLICY_REFUSED if is_refused else LogId.AGENT_FAILED
        log.error(text, log_id=log_id, reason=str(error))
        return 2 if is_refused else 1
    except BaseException:
        log.exception("the agent failed", log_id=LogId.AGENT_FAILED)
        return 1
    finally:
        events.close()
    return 0
