"""Logs and metrics.

log.py      structlog set-up, fields of an event, failures logged on change
log_ids.py  ids of log messages: for the Event Log, the journal, alerts
metrics.py  every metric in one table
"""
