"""HTTP for all clients of the agent. It knows no particular service.

transport.py  one exchange within one deadline, with a bounded answer, TLS and a proxy
errors.py     one list of error kinds, the kind of each exception and status, times in headers
retry.py      the growing pause after failures
"""
