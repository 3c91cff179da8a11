"""A Kubernetes cluster: drains the node of this machine before an event, and gives it back afterwards.

account.py  the API server, and as whom it is asked: a kubeconfig, or a pod's service account
client.py   one request to it
background.py  requests on threads of their own
node.py     the node of this machine: cordon and uncordon, with a mark
pods.py     which pods of the node have to go
drain.py    evicts them, in the time there is
leases.py   the backend of a fleet in Leases

It knows no policy, no state and no daemon. Nothing of it is imported unless a command or the policy asks for it.
"""
