"""Hooks: the operator's programs.

run.py        run one hook: environment, time limit, whole process tree
command.py    its command line
output.py     its output: lines for the log, the tail for the result
durations.py  how long hooks may take, from their limits and their last runs (pure)
preflight.py  what is wrong with the files that a policy names
"""
