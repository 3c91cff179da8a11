#!/bin/sh
# bytecode.sh compile|remove: the compiled form of the agent's modules, for the Python that the launcher picks.
# Called by the packages' scripts. Without it the agent works as well, but takes longer to start.
set -eu
home=/usr/lib/scheduled-events-agent

find "$home" -depth -type d -name __pycache__ -exec rm -rf {} +
[ "$1" = compile ] || exit 0

# shellcheck source=packaging/interpreter.sh
. "$home/interpreter.sh"
find_python || exit 0 # the launcher tells the user
exec "$python" -I -S -m compileall -q -f --invalidation-mode timestamp \
    "$home/scheduled_events_agent" "$home/certifi" "$home/h11" "$home/httpcore" "$home/httpx" "$home/idna" \
    "$home/prometheus_client" "$home/psutil" "$home/structlog" "$home/$abi"
