"""Base class of operating-system errors."""

from scheduled_events_agent import AgentError


class HostError(AgentError):
    """The system denied an operation, or something that it was expected to have is missing."""
