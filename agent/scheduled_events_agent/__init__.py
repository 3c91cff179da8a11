"""scheduled-events-agent: prepares this VM for Azure Scheduled Events, approves and recovers.

Decisions are values. The edges carry them out.

    imds/           PURE+EDGE Azure's side: bytes -> Document, ScheduledEvent; the requests to the metadata service
    http/           EDGE      one bounded exchange, one list of what can go wrong with it, the pause after failures
    policy/         PURE      (rules, event, context) -> Decision with a reason; settings, YAML, checks, durations
    workflow/       PURE      what happens next: (workflows, signals, context) -> transitions
    status/         PURE      types of status and history; what needs a person; messages; operators' actions
    hooks/          EDGE      run one hook: environment, time limit, whole process tree, output
    store/          EDGE      SQLite: workflows, journal, operator requests, unsent notifications; the last policy
    telemetry/      EDGE      log, ids of log messages, metrics
    notifications/  EDGE      one notification: its formats, and one exchange with the service that it is for
    fleet/          EDGE      several VMs: the store through which they coordinate
    kubernetes/     EDGE      a cluster's node: its API server, cordon and drain
    web/            EDGE      the web server, its endpoints and TLS, the files of the status page
    host/           SEAM      what differs between Linux and Windows, and nothing else
    engine/         SHELL     a cycle: receive, decide, commit, perform; no thread, no clock of its own
    daemon/         SHELL     the loop and its threads around the engine
    cli/            SHELL     one file for each command; the only place that wires parts together
    simulator/                the metadata service itself, for demos, users' tests and ours

Imports point downwards only; tests/unit/test_layering.py checks it.
"""

from pathlib import Path

__version__ = "0.1.0"
RUNBOOK_URL = "https://source.scheduled-events-agent.invalid/blob/main/docs/runbook.md"
"""Address of the runbook, as in pyproject.toml. It has a section for each kind of attention and each alert."""


class AgentError(Exception):
    """An error whose message says what went wrong and what to do.

    ``kind`` is a word from a small closed set, safe as a metric label. ``summary``: a few words to end a sentence.
    """

    def __init__(self, message: str, *, kind: str = "error", summary: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.summary = summary or message


def find_runbook(address: str, package: Path) -> str:
    """Where the runbook is: its address, or while that ends in .invalid the path of the page on this machine.

    ``package``: the folder of the agent's code, in a checkout or installed.
    """
    server = address.partition("//")[2].partition("/")[0]
    if not server.endswith(".invalid"):
        return address
    in_checkout = package.parent.parent / "docs/runbook.md"
    installed = [place / "share/scheduled-events-agent/runbook.md" for place in package.parents]
    pages = [page for page in (in_checkout, *installed) if page.is_file()]
    return str(pages[0]) if pages else "runbook.md"


RUNBOOK = find_runbook(RUNBOOK_URL, Path(__file__).parent)
"""Where the runbook is: an address, or a path on this machine."""
