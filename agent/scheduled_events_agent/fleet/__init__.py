"""The fleet: VMs of a group that coordinate through a table that all of them can read.

backend.py      the interface of the storage: list, put (ETag), delete (ETag)
plan.py         records and requests -> what to write, and how each event stands (pure)
client.py       one sync: list, plan, write
table.py        the backend in Azure's Table Storage
credentials.py  managed identity, shared access signatures
"""
