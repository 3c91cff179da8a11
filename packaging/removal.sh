#!/bin/sh
# removal.sh: says on standard error which events are prepared when the agent is removed, and which recover hooks will not
# run. Called by the packages' scripts once the service has stopped. It only reads the state, and gives up after five seconds.
set -eu

# The policy that the service goes by, which may name another place for the state.
for setting in $(systemctl show --property=Environment --value scheduled-events-agent.service 2>/dev/null); do
    case $setting in
        SCHEDULED_EVENTS_AGENT_CONFIG=*) export "SCHEDULED_EVENTS_AGENT_CONFIG=${setting#*=}" ;;
    esac
done
timeout -k 1 4 /usr/bin/scheduled-events-agent status --prepared 2>/dev/null |
    while IFS= read -r line; do echo "scheduled-events-agent: $line" >&2; done
