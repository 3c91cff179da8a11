"""The fleet: VMs of a group that act together through a table that all of them can read."""
