"""Stores this VM's identity, as the metadata service last reported it, in the state file."""

from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.policy.settings import VmSettings
from scheduled_events_agent.store import Store


def load_identity(store: Store) -> Identity:
    """This VM's identity as last stored. Raises StoreError."""
    name, vm_id, group = store.load_fact("vm_name"), store.load_fact("vm_id"), store.load_fact("vm_group")
    return Identity(name=name, vm_id=vm_id, group=group)


def save_identity(store: Store, identity: Identity, boot_id: str) -> None:
    """Store this VM's identity. Raises StoreError."""
    store.save_facts(
        {"vm_name": identity.name, "vm_id": identity.vm_id, "vm_group": identity.group, "boot_id": boot_id}
    )


def names_of(vm: VmSettings, identity: Identity) -> tuple[str, ...]:
    """The names that documents may use for this VM."""
    return tuple(name for name in (vm.name or identity.name, *vm.aliases) if name)
