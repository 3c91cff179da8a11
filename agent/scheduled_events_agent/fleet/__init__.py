"""The fleet: VMs of a group that coordinate through a store that all of them can read.

backend.py      the interface of the storage: list, put (ETag), delete (ETag)
plan.py         records and requests -> what to write, and how each event stands (pure)
client.py       one sync: list, plan, write
table.py        the backend in Azure's Table Storage; that in Leases of a Kubernetes cluster is in kubernetes/
credentials.py  managed identity, shared access signatures
"""
