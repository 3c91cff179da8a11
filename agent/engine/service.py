"""What is remembered of the metadata service: who it says that this VM is, and when it last answered."""

from datetime import datetime, timedelta

from agent import host
from agent.engine.parts import Machine
from agent.imds import Identity
from agent.store import Store

# After a day without a request the service switches Scheduled Events off for the VM.
_SERVICE_KNOWN = timedelta(hours=24)
_REMEMBER_ANSWER = timedelta(hours=1)


def load_identity(store: Store) -> Identity:
    """Who this VM was when it was last asked. Raises StoreError."""
    name, vm_id, group = store.load_fact("vm_name"), store.load_fact("vm_id"), store.load_fact("vm_group")
    return Identity(name=name, vm_id=vm_id, group=group)


def save_identity(store: Store, identity: Identity, boot_id: str) -> None:
    """Raises StoreError."""
    store.save_facts(
        {"vm_name": identity.name, "vm_id": identity.vm_id, "vm_group": identity.group, "boot_id": boot_id}
    )


class Service:
    """When the service last answered."""

    def __init__(self, store: Store, machine: Machine) -> None:
        self._store = store
        self._machine = machine
        self._remembered_at: datetime | None = None

    def has_answered(self, this_boot: str) -> bool:
        """Whether it has answered this VM lately, so that Scheduled Events are switched on."""
        boot_id, _, stamp = self._store.load_fact("service_answered").rpartition(" ")
        if not stamp or not host.is_same_boot(boot_id, this_boot):
            return False
        age = self._machine.now() - datetime.fromisoformat(stamp)
        return timedelta(0) <= age < _SERVICE_KNOWN

    def remember(self, at: datetime | None, boot_id: str) -> None:
        """At most once an hour: that is enough after a restart."""
        before = self._remembered_at
        if at is None or (before is not None and abs(at - before) < _REMEMBER_ANSWER):
            return
        self._remembered_at = at
        self._store.save_facts({"service_answered": f"{boot_id} {at.isoformat()}"})
