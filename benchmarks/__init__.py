"""Speed and size of the agent, each figure beside that of a bare loop that was measured in the same run.

``python -m benchmarks`` prints the table; docs/benchmarks.md says what each row means. Nothing here is a timed
test, and nothing in the agent knows of it: what is measured is the agent as it is installed.
"""
