#!/bin/sh
# /usr/bin/scheduled-events-agent: the agent, with the first of this machine's Pythons that it supports.
set -eu
home=/usr/lib/scheduled-events-agent

# shellcheck source=packaging/interpreter.sh
. "$home/interpreter.sh"
if ! find_python; then
    echo "scheduled-events-agent: needs Python 3.11, 3.12, 3.13 or 3.14 in /usr/bin or /usr/local/bin;" \
        "found ${found:-none}. What to do on this system: /usr/share/doc/scheduled-events-agent/install-linux.md" >&2
    # EX_CONFIG of sysexits.h, which the agent itself never ends with. After it, systemd does not start the unit again.
    exit 78
fi
# Isolated (-I) and without the system's packages (-S): nothing but what was shipped is imported. Without writing
# bytecode (-B): what is in /usr is the package manager's.
exec "$python" -I -S -B "$home/start.py" "$@"
