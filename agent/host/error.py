"""The base error of everything that a system refuses."""

from agent import AgentError


class HostError(AgentError):
    """The system refused something, or something it was expected to have is missing."""
