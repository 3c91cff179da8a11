#!/bin/sh
# restart.sh COMMAND...: has COMMAND restart the service, now that this version is in place. Called by the packages'
# scripts, and by whatever else installs the agent. It does not, and says why, if the agent would not come up again: what
# runs may go by a policy from before its file went bad, or on a state that only its own version can read. While hooks run
# it does so later, in a unit of its own, and does not keep the package manager waiting: a restart would cut them off, and
# begin them again.
set -eu
unit=scheduled-events-agent.service
agent=/usr/local/bin/scheduled-events-agent # the packages say /usr/bin
waiting=scheduled-events-agent-restart.service

is_later=
if [ "$1" = --later ]; then
    is_later=yes
    shift
fi

refuse() {
    echo "$said" >&2
    echo "scheduled-events-agent: $1, so the version before runs on. When it $2: systemctl restart scheduled-events-agent" >&2
    exit 1
}

show() { systemctl show --property="$1" --value "$unit"; }

if ! systemctl --quiet is-active "$unit"; then
    [ -z "$is_later" ] || exit 0 # an operator has stopped it meanwhile
    exec "$@"
fi

# The policy that the service goes by, if a drop-in names another one.
for setting in $(show Environment); do
    case $setting in
        SCHEDULED_EVENTS_AGENT_CONFIG=*) export SCHEDULED_EVENTS_AGENT_CONFIG="${setting#*=}" ;;
    esac
done
# Asked as the account of the service, which may be one that cannot read what root can, and is only warned of what root
# refuses. (Not by runuser: not every distribution has it.)
account=
user=$(show User)
if [ "${user:-root}" != root ]; then
    said=$(id -g "$user" 2>&1) || refuse "the account of the service is not known" is
    group=$(show Group)
    group=${group:-$said}
    groups=$(id -G "$user" | tr ' ' ',')
    for other in $(show SupplementaryGroups); do groups=$groups,$other; done
    account="setpriv --reuid=$user --regid=$group --groups=$groups"
fi

ask() {
    # shellcheck disable=SC2086  # several words or none
    (cd / && $account "$agent" "$@" 2>&1)
}

said=$(ask check) || refuse "the policy is not valid" is
# Any other trouble with the state is for the agent: it begins without one, and brings an older one up to date.
said=$(ask history --limit 1) || case $said in
    *"written by a newer version"*) refuse "this version cannot read the state" can ;;
esac

# The agent says so in its status line, in these words in every version.
runs_hooks() {
    case $(show StatusText) in
        "runs hook"*) return 0 ;;
    esac
    return 1
}

if [ -z "$is_later" ]; then
    runs_hooks || exec "$@"
    systemctl --quiet is-active "$waiting" ||
        systemd-run --quiet --collect --unit="$waiting" --description="Restarts $unit when no hook runs" \
            "$0" --later "$@"
    echo "scheduled-events-agent: hooks are running, so the service is restarted when they have ended; until then the" \
        "version before runs on. What becomes of that: journalctl -u $waiting" >&2
    exit 0
fi

first=$(show InvocationID)
while systemctl --quiet is-active "$unit" && runs_hooks; do sleep 1; done
# Stopped, or restarted by something else, and so of this version.
if ! systemctl --quiet is-active "$unit" || [ "$(show InvocationID)" != "$first" ]; then exit 0; fi
echo "no hook runs any more: the service is restarted"
exec "$@"
