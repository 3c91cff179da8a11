"""Who the metadata service has said that this VM is, remembered in the state file."""

from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.policy.settings import VmSettings
from scheduled_events_agent.store import Store


def load_identity(store: Store) -> Identity:
    """Who this VM was when it was last asked. Raises StoreError."""
    name, vm_id, group = store.load_fact("vm_name"), store.load_fact("vm_id"), store.load_fact("vm_group")
    return Identity(name=name, vm_id=vm_id, group=group)


def save_identity(store: Store, identity: Identity, boot_id: str) -> None:
    """Raises StoreError."""
    store.save_facts(
        {"vm_name": identity.name, "vm_id": identity.vm_id, "vm_group": identity.group, "boot_id": boot_id}
    )


def names_of(vm: VmSettings, identity: Identity) -> tuple[str, ...]:
    """What documents may call this VM."""
    return tuple(name for name in (vm.name or identity.name, *vm.aliases) if name)
