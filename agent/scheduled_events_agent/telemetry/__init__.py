"""Logs and metrics.

log.py      structlog set-up, fields of an event, failures logged on change
log_ids.py  ids of log messages: for the Event Log, the journal, alerts
metrics.py  every metric in one table
"""

import os

# With it, prometheus-client would keep the values in files, which it cannot for metrics of a registry like ours.
for _name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
    os.environ.pop(_name, None)
