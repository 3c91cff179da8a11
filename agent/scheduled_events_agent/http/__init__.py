"""HTTP as all clients of the agent use it; it knows no service.

transport.py  one exchange within one deadline, with a bounded answer, TLS and a proxy
errors.py     what can go wrong: one list of kinds, and which exception or status is which
    retry.py      the growing pause after failures
"""
