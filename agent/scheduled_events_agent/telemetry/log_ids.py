"""Ids of what the agent logs, for filters and alerts: one table, and an id never changes its meaning.

A log call gives its id as ``log_id``. The number is the event's id in Windows' Event Log; ``message_id`` is the
MESSAGE_ID in the journal of systemd, which only the main events have.
"""

from enum import IntEnum
from typing import Self


class LogId(IntEnum):
    """Number, level and meaning; records of an event have their kind's name here."""

    level: str
    """The level of its entries; the levels, divided by a comma, if they differ."""
    meaning: str

    def __new__(cls, number: int, level: str, meaning: str) -> Self:
        """Number, level and meaning are those in the table below."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.level = level
        member.meaning = meaning
        return member

    @property
    def message_id(self) -> str:
        """The MESSAGE_ID of this id; empty if it has none."""
        return _MESSAGE_IDS.get(self, "")

    AGENT_STARTED = 100, "info", "The agent started."
    AGENT_STOPPED = 101, "info", "The agent stopped."
    AGENT_STOPPING = 102, "info", "The agent stops once the hooks that run have ended or their time is up."
    AGENT_FAILED = 103, "error", "The agent failed; the service's recovery actions start it again."
    POLICY_REJECTED = 110, "error", "The policy file was rejected: correct it, then reload or start again."
    POLICY_RELOADED = 111, "info", "The policy file was read again."
    POLICY_WARNING = 112, "warning", "The policy file, or a file that it names, has a warning."
    LOG_FILE_REJECTED = 113, "warning", "The log file is not written because others could change its directory."
    PAGES_FAILED = 114, "error", "The HTTP server cannot listen, or a change of agent.web_config was rejected."
    PAGES_WORK = 115, "info", "The HTTP server is listening, or the changed agent.web_config is in force."
    SEEN = NAMED = 200, "info", "A scheduled event was seen."
    DECIDED = 201, "info", "The agent decided what to do about the event."
    CHANGED = RENAMED = MISSING = 202, "info", "The event changed."
    STARTED = 203, "info", "The event started."
    GONE = 204, "info", "The event is no longer in the document."
    MANY_EVENTS = 205, "warning", "Very many events were seen at once: the log has only the first ones."
    EXPIRED = 206, "info", "A recommendation has expired: what was prepared for it is recovered."
    UNPREPARED = 207, "warning", "Azure started an event that was not prepared."
    PREPARING = PREPARED = WAITING = 210, "info", "Preparation goes on, waits or is done."
    HOOK_STARTED = 220, "info", "A hook started."
    HOOK_SUCCEEDED = 221, "info", "A hook succeeded."
    HOOK_FAILED = 222, "warning", "A hook failed or ran out of time."
    HOOK_CANCELED = 223, "info", "A hook was canceled."
    HOOK_CUT_SHORT = (
        224,
        "warning",
        "A hook was cut short and runs again, or hooks that an earlier agent left running were ended.",
    )
    HOOK_DELAYED = 225, "info", "A hook that had to wait or was cut short starts now."
    APPROVING = 230, "info", "The approval is sent."
    APPROVED = 231, "info", "Azure has accepted the approval."
    APPROVAL_FAILED = 232, "warning", "An approval failed; it is sent again."
    HELD = 240, "warning", "The event is held: Azure waits until NotBefore, then starts it."
    HOOK_MISSING = 241, "warning", "Recovery waits for a hook that is not in the policy: put it back."
    OPERATOR = 242, "info", "An operator made a request."
    APPROVAL_NEEDED = 243, "warning", "The event waits for an operator's approval."
    WITHOUT_SLOT = 244, "warning", "Preparation begins without a slot of the fleet."
    EVENT_VM_UNKNOWN = 245, "warning", "Nothing says whether a pending event names this VM."
    RECOVERING = 250, "info", "Recovery begins."
    CLOSED = 251, "info", "The event is over and what was prepared is recovered."
    RECOVERY_FAILED = 252, "warning", "The event is over, but recovery failed: retry or resolve it."
    RESTARTED = 260, "info", "The agent restarted while the event was pending."
    REMOVED_PREPARED = (
        261,
        "warning",
        "The agent was removed while an event was prepared: nothing recovers from it.",
    )
    POLLING_FAILS = 300, "warning", "The metadata service does not answer."
    POLLING_WORKS = 301, "info", "The metadata service answers again."
    VM_UNKNOWN = 302, "warning", "This VM's name is not known yet."
    VM_KNOWN = 303, "info", "This VM is known."
    OTHER_VM = 304, "warning", "The state belongs to another VM and is not used."
    API_VERSION = 305, "info, warning", "The api-version for recommendations is rejected, or answered again."
    OTHER_AGENT = (
        306,
        "warning",
        "Another agent acts on this machine too: stop one of the two, or start it with --observe.",
    )
    CLOCK = 307, "info, warning", "The clock of this VM differs from Azure's by minutes, or is right again."
    STATE_NOT_WRITTEN = 310, "warning", "The state file cannot be written: the agent does nothing until it can."
    STATE_WRITTEN = 311, "info", "The state file can be written again."
    STATE_LOST = (
        312,
        "error",
        "The state file is damaged, was removed or replaced, or could not be written at the end.",
    )
    NO_RESERVE = 313, "warning", "The disk is nearly full: the state file cannot keep its reserve."
    RESERVE = 314, "info", "The state file has its reserve for a full disk again."
    STATE_SETTLED = 315, "info", "After a loss of state on_clear has succeeded, or an operator has resolved it."
    EVENT_BUG = 320, "warning, error", "An event could not be handled: a bug, which concerns this event only."
    NOTIFICATIONS_FAIL = 330, "warning", "A service that is notified of events does not accept a notification."
    NOTIFICATIONS_WORK = 331, "info", "A service that is notified of events accepts notifications again."
    NOTIFICATIONS_DROPPED = (
        332,
        "warning, error",
        "A notification is lost: rejected, too old, one too many, or without its target.",
    )
    FLEET_FAILS = (
        340,
        "warning",
        "The fleet's store cannot be used: events wait, or begin without a slot, as the policy says.",
    )
    FLEET_WORKS = 341, "info", "The fleet's store can be used again."
    FLEET_SAME_NAME = 342, "error", "Another VM of the fleet uses the name of this one: events of this VM wait."
    FLEET_MEMBERS = (
        343,
        "error",
        "fleet.members does not match this VM: all VMs that an event names are waited for.",
    )
    KUBERNETES_FAILS = 350, "warning", "The conditions of the Kubernetes node cannot be updated."
    KUBERNETES_WORKS = 351, "info", "The conditions of the Kubernetes node can be updated again."
    MACHINE_PAUSED = 400, "warning", "The machine was paused; the pause was measured."
    OTHER_WARNING = 998, "warning", "Any other warning."
    OTHER_ERROR = 999, "error", "Any other error."


_MESSAGE_IDS = {
    LogId.AGENT_STARTED: "b969c3a8b960af4f14e1daebbecda93a",
    LogId.AGENT_STOPPED: "550cf1d9a7ea92eae1b47a0fe5a35d76",
    LogId.AGENT_FAILED: "33639dff0b4397176cb22a0e1955e485",
    LogId.POLICY_REJECTED: "cf9130bfbff70a64e1a0af9c1f6256db",
    LogId.POLICY_RELOADED: "de1d53f8e4f212034f290539f3a2490e",
    LogId.SEEN: "1c67b9ef73bb030a8081b914b995a88e",
    LogId.STARTED: "c63551d4e450f80e0b85bd9020b4d0cb",
    LogId.UNPREPARED: "e56adb23c76941eda4b935ffc68db199",
    LogId.HOOK_SUCCEEDED: "a86b268a6a927dba1e68eb4ebc1c1604",
    LogId.HOOK_FAILED: "a86b268a6a927dba1e68eb4ebc1c1604",
    LogId.APPROVED: "2855498063661c9e205b7f42c4aa4c2e",
    LogId.APPROVAL_FAILED: "cf1f2f16690f1477c3d285a10504b83c",
    LogId.HELD: "ffa508265f4ac3015b330b8441256bf7",
    LogId.HOOK_MISSING: "b6c32ffe6835e13347691924b0d354d0",
    LogId.APPROVAL_NEEDED: "b4557d978e4e4ba5bf92a89869195a15",
    LogId.EVENT_VM_UNKNOWN: "ccf281b5a7454689aa9f1a8ccc11770e",
    LogId.OPERATOR: "69b1417fc1ac0cb5059a0abd3d24e73a",
    LogId.CLOSED: "79b8242fe79852f9876b213a51683173",
    LogId.RECOVERY_FAILED: "2d06dfa91df2f8b8b8cdcd4c84ab8fe5",
    LogId.MACHINE_PAUSED: "fd26599cf79a5c0a16ed4997c6fc7d9c",
}


def log_id_of(log_id: LogId | None, level: str) -> LogId | None:
    """The call's id; without one, the id of other warnings or errors; None for less severe entries."""
    return log_id or {"warning": LogId.OTHER_WARNING, "error": LogId.OTHER_ERROR}.get(level)


def messages_source() -> str:
    """The texts of all ids as Windows' message compiler (mc, windmc) reads them; %1 is the entry's own text."""
    lines = ["MessageIdTypedef=DWORD", "LanguageNames=(English=0x409:MSG00409)", ""]
    for log_id in LogId:
        lines += [f"MessageId={log_id.value}", "Language=English", f"%1%n%n{log_id.meaning}", ".", ""]
    return "\r\n".join(lines)
