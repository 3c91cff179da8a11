"""Windows implementation of ``scheduled_events_agent.host``."""
