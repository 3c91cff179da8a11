#!/bin/sh
# may-restart.sh: whether the service may be restarted, now that this version is in place; says why not.
# Called by the packages' scripts. What runs may go by a policy from before its file went bad, or on a state that only
# its own version can read: started anew it would not come up at all, and nobody would listen for events.
set -eu
unit=scheduled-events-agent.service
agent=/usr/bin/scheduled-events-agent

refuse() {
    echo "$said" >&2
    echo "scheduled-events-agent: $1, so the version before runs on. When it $2: systemctl restart scheduled-events-agent" >&2
    exit 1
}

systemctl --quiet is-active "$unit" || exit 0

show() { systemctl show --property="$1" --value "$unit"; }

# The policy that the service goes by, if a drop-in names another one.
for setting in $(show Environment); do
    case $setting in
        SCHEDULED_EVENTS_AGENT_CONFIG=*) export SCHEDULED_EVENTS_AGENT_CONFIG="${setting#*=}" ;;
    esac
done
# Asked as the account of the service, which may be one that cannot read what root can, and is only warned of what root
# refuses. (Not by runuser: not every distribution has it.)
user=$(show User)
set --
if [ "${user:-root}" != root ]; then
    said=$(id -g "$user" 2>&1) || refuse "the account of the service is not known" is
    group=$(show Group)
    group=${group:-$said}
    groups=$(id -G "$user" | tr ' ' ',')
    for other in $(show SupplementaryGroups); do groups=$groups,$other; done
    set -- setpriv --reuid="$user" --regid="$group" --groups="$groups"
fi
cd /
said=$("$@" "$agent" check 2>&1) || refuse "the policy is not valid" is
# Any other trouble with the state is for the agent: it begins without one, and brings an older one up to date.
said=$("$@" "$agent" history --limit 1 2>&1) || case $said in
    *"written by a newer version"*) refuse "this version cannot read the state" can ;;
esac
