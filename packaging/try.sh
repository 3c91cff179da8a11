#!/bin/sh
# Installs the package of this system from a folder, has the agent approve one event of its simulator, and removes the
# package. As root, in a machine or container that is thrown away afterwards:
#
#   packaging/try.sh dist
set -eu
folder=$(cd "$1" && pwd)
work=$(mktemp -d)
pids=

end() {
    # shellcheck disable=SC2086  # several words
    [ -z "$pids" ] || kill $pids 2>/dev/null || :
    rm -rf "$work"
}
trap end EXIT

fail() {
    echo "packaging/try.sh: $1" >&2
    cat "$work/agent.log" "$work/simulator.log" >&2 2>/dev/null || :
    exit 1
}

echo "=== install"
if command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q
    apt-get install -qy --no-install-recommends "$folder"/*_"$(dpkg --print-architecture)".deb
    remove="apt-get purge -qy scheduled-events-agent"
elif command -v tdnf >/dev/null; then
    tdnf install -y --nogpgcheck "$folder"/*-1."$(uname -m)".rpm
    remove="tdnf remove -y scheduled-events-agent"
else
    dnf install -y "$folder"/*-1."$(uname -m)".rpm
    remove="dnf remove -y scheduled-events-agent"
fi
scheduled-events-agent --version

echo "=== approve one event"
cat >"$work/policy.yaml" <<EOF
vm: {name: vm-1}
imds: {endpoint: "http://127.0.0.1:8169"}
agent: {listen: off, state_dir: $work/state}
rules:
  - {name: all, approve: immediately}
EOF
scheduled-events-agent simulate user-reboot --port 8169 --speed 10 >"$work/simulator.log" 2>&1 &
pids=$!
scheduled-events-agent run --config "$work/policy.yaml" >"$work/agent.log" 2>&1 &
pids="$pids $!"
for _ in $(seq 60); do
    sleep 1
    grep -q " approved " "$work/simulator.log" && break
done
grep " approved " "$work/simulator.log" || fail "the agent approved nothing within a minute"

echo "=== remove"
# shellcheck disable=SC2086  # several words
kill $pids 2>/dev/null || :
pids=
$remove
[ ! -e /usr/bin/scheduled-events-agent ] || fail "the command is still there"
echo "packaging/try.sh: as expected"
