"""The account and the node that the policy names, for the agent that runs; else what its hooks would find."""

import socket

from scheduled_events_agent import host
from scheduled_events_agent.kubernetes.account import Account, NodeName, agent_environ, find_account, find_node
from scheduled_events_agent.kubernetes.client import Client
from scheduled_events_agent.kubernetes.node_status import NodeStatus
from scheduled_events_agent.policy.settings import KubernetesSettings


def find_own_account(settings: KubernetesSettings) -> tuple[Account, NodeName]:
    """The account, and the name of this machine's node. Raises AccountError or HostError."""
    environ = agent_environ()
    account = find_account(settings.kubeconfig, environ)
    return account, find_node(account, settings.node, environ, socket.gethostname())


def find_own_node(settings: KubernetesSettings) -> NodeStatus:
    """The node of this machine. Asks nothing yet. Raises AccountError or HostError."""
    account, node = find_own_account(settings)
    return NodeStatus(Client(account), node.name, host.kubelet_boot_id())
