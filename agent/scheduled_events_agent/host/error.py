"""The base error of everything that a system refuses."""

from scheduled_events_agent import AgentError


class HostError(AgentError):
    """The system refused something, or something it was expected to have is missing."""
