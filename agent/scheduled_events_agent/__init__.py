"""scheduled-events-agent: prepares this VM for Azure Scheduled Events, approves and recovers.

Decisions are values, and edges carry them out.

    events.py     PURE   what Azure says: bytes -> Document, ScheduledEvent
    policy.py     PURE   what the operator wants: (rules, event, facts) -> Decision with a reason
    api_version.py PURE  in which api-version the document is asked for
    workflow/     PURE   what happens next: (board, signals, context) -> steps
    hook_times.py PURE   how long hooks may take, from their limits and their last runs
    status/       PURE   what there is to see: its types, what needs a person, the words, the commands
    spelling.py   PURE   how people write durations, and what a misspelt word was meant to be
    typed_yaml.py PURE   YAML text -> frozen values along their types, every error with its line
    yaml_nodes.py PURE   YAML text -> nodes, syntax errors in plain words
    settings/            the policy file: its types, checks, warnings and schema
    http/         EDGE   one bounded exchange, and one list of what can go wrong with it
    imds.py       EDGE   fetch the document, post approvals, find the endpoint and this VM's name
    notices/      EDGE   notifications: their bodies, and one exchange with the service they are for
    fleet/        EDGE   several VMs: the table through which they tell each other what they do
    hooks/        EDGE   run one hook; before that, what this machine says about the policy (preflight.py)
    store/        EDGE   SQLite: workflows, journal, operator requests
    web/          EDGE   the web server, its certificates, and the files of the status page
    metrics.py    EDGE   every metric in one table
    log_ids.py    PURE   ids of log messages: for the Event Log, the journal, alerts
    log.py        EDGE   structlog set-up; event fields; failures logged on change
    host/         SEAM   what differs between Linux and Windows, and nothing else
    simulator/           the service itself, for demos, users' tests and ours
    engine/       SHELL  a cycle: receive, decide, commit, perform, publish; no thread, no clock of its own
    daemon/       SHELL  the loop and its threads around the engine
    cli/          SHELL  the command line; the only place that wires parts together

Imports point downwards only; tests/unit/test_layering.py checks it.
"""

__version__ = "0.1.0"


class AgentError(Exception):
    """What went wrong, told so that the reader knows the way out.

    ``kind`` is a word from a small closed set, safe as a metric label.
    """

    def __init__(self, message: str, *, kind: str = "error") -> None:
        super().__init__(message)
        self.kind = kind
