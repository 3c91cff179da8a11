"""Stores this VM's identity, as the metadata service last reported it, in the state file."""

from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.policy.settings import VmSettings
from scheduled_events_agent.store import Store


def load_identity(store: Store) -> Identity:
    """This VM's identity as last stored. Raises StoreError."""
    name, vm_id, group = store.get_meta("vm_name"), store.get_meta("vm_id"), store.get_meta("vm_group")
    return Identity(name=name, vm_id=vm_id, group=group)


def save_identity(store: Store, identity: Identity, boot_id: str) -> None:
    """Store this VM's identity. Raises StoreError."""
    store.set_meta(
        {"vm_name": identity.name, "vm_id": identity.vm_id, "vm_group": identity.group, "boot_id": boot_id}
    )


def names_of(vm: VmSettings, identity: Identity) -> tuple[str, ...]:
    """The names that documents may use for this VM."""
    return tuple(name for name in (vm.name or identity.name, *vm.aliases) if name)
