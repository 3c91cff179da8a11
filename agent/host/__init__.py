"""What differs between Linux and Windows, and nothing else.

Each of the two modules defines the same functions with the same signatures. They know nothing of events, policy
or hooks, and import nothing of the agent but its base error.
"""

import sys

if sys.platform == "win32":
    from agent.host.windows import (
        HeldLock,
        HostError,
        ProcessTree,
        account_name,
        base_environment,
        boot_id,
        can_change_user,
        claim_port,
        create_private_dir,
        decode_output,
        default_config_path,
        default_state_dir,
        dhcp_option_245,
        end_marked,
        flush_directory,
        has_account,
        has_terminal_colors,
        hold_lock,
        is_same_boot,
        is_writable,
        reap_orphans,
        start_tree,
    )
else:
    from agent.host.linux import (
        HeldLock,
        HostError,
        ProcessTree,
        account_name,
        base_environment,
        boot_id,
        can_change_user,
        claim_port,
        create_private_dir,
        decode_output,
        default_config_path,
        default_state_dir,
        dhcp_option_245,
        end_marked,
        flush_directory,
        has_account,
        has_terminal_colors,
        hold_lock,
        is_same_boot,
        is_writable,
        reap_orphans,
        start_tree,
    )

__all__ = [
    "HeldLock",
    "HostError",
    "ProcessTree",
    "account_name",
    "base_environment",
    "boot_id",
    "can_change_user",
    "claim_port",
    "create_private_dir",
    "decode_output",
    "default_config_path",
    "default_state_dir",
    "dhcp_option_245",
    "end_marked",
    "flush_directory",
    "has_account",
    "has_terminal_colors",
    "hold_lock",
    "is_same_boot",
    "is_writable",
    "reap_orphans",
    "start_tree",
]
