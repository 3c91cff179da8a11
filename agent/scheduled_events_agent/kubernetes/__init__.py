"""A Kubernetes cluster: drains the node of this machine, gives it back, and reports its events.

account.py      the API server, and as whom it is asked: a kubeconfig, or a pod's service account
client.py       one request to it
background.py   requests on threads of their own, for a command that a signal may end
node.py         the node of this machine: cordon and uncordon, with a mark
pods.py         which pods of the node have to go
drain.py        evicts them, in the time there is
conditions.py   what the node's conditions should be, and what has to be written for it (pure)
node_status.py  reads and writes them
condition_writer.py  writes them beside a drain
own_node.py     the account and the node that the policy names
rights.py       what the account must be allowed to do, and whether it is
events.py       events about the node: a format of notifications
leases.py       the backend of a fleet in Leases

It knows no state and no daemon. Nothing of it is imported unless a command or the policy asks for it.
"""
