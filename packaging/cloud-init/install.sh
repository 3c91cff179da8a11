#!/bin/sh
# Installs the agent on this machine and starts it: for cloud-init, for Azure's Custom Script extension, or to run it yourself.
#
#   install.sh REPOSITORY [KEY [POLICY]]
#   install.sh PACKAGE [SHA256 [POLICY]]
#
# REPOSITORY  the address of one for apt, dnf, tdnf or zypper
# KEY         a file with its public key (.asc); "-" for the one that it offers itself
# PACKAGE     a .deb, a .rpm, or a .whl (which goes to /opt/scheduled-events-agent): a file or an address of one
# SHA256      what the package's sum must be; "-" for a package that is trusted as it comes
# POLICY      a file that becomes /etc/scheduled-events-agent/policy.yaml if the agent finds nothing wrong with it
#
# Run again, it installs what is newer. It restarts the agent for another version, when no hook runs; it reloads it for
# another policy alone; and it leaves it alone if nothing has changed. The policy may hold secrets: only root can read it, or
# the account of the strict set-up. The mode and owner that an administrator has given to the file stay.
set -eu
umask 022 # users read apt's sources and the units; the strict set-up's account runs what is in /opt

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

case $# in
    1 | 2 | 3) ;;
    *) fail "expected REPOSITORY [KEY [POLICY]] or PACKAGE [SHA256 [POLICY]]; got $# arguments" ;;
esac
[ "$(id -u)" -eq 0 ] || fail "only root can install a service"
source=$1 proof=${2:--} policy=${3:-}
unit=scheduled-events-agent.service
[ -z "$policy" ] || [ -f "$policy" ] || fail "$policy: there is no such policy file"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fetch() { # ADDRESS FILE
    if command -v curl >/dev/null; then
        curl --fail --silent --show-error --location --retry 5 --output "$2" "$1"
    elif command -v wget >/dev/null && [ "${1#file:}" = "$1" ]; then
        wget --quiet --tries=5 --output-document="$2" "$1"
    else
        python3 -c 'import sys, urllib.request as u; u.urlretrieve(*sys.argv[1:])' "$1" "$2"
    fi
}

get_package() { # sets what is installed
    case $source in
        http://* | https://* | file://*)
            wanted=$work/$name
            fetch "$source" "$wanted"
            ;;
        *)
            wanted=$(realpath "$source")
            ;;
    esac
    [ -s "$wanted" ] || fail "${source%%\?*}: there is no such package"
    if [ "$proof" != - ]; then
        echo "$proof  $wanted" | sha256sum --check --quiet - || fail "${source%%\?*}: its SHA-256 is not $proof"
    fi
    is_file=yes # its sum was checked, or it is trusted: it needs no signature
}

update_lists() { # apt waits for the lock of packages, but not for that of its lists
    tries=60
    until LC_ALL=C.UTF-8 apt-get update 2>"$work/errors"; do
        cat "$work/errors" >&2
        tries=$((tries - 1))
        if [ "$tries" -eq 0 ] || ! grep -q /lists/lock "$work/errors"; then fail "apt-get update failed"; fi
        sleep 10
    done
    cat "$work/errors" >&2
}

add_repository() { # sets what is installed, and its kind
    source=${source%/} key=$proof
    case $source in
        http://* | https://*) ;;
        *) fail "${source%%\?*}: expected a .deb, a .rpm, a .whl or the address of a repository" ;;
    esac
    if [ "$key" = - ]; then
        key=$work/key
        fetch "$source/scheduled-events-agent.asc" "$key"
    fi
    [ -s "$key" ] || fail "$key: there is no such key"
    if command -v apt-get >/dev/null; then
        kind=deb
        kept=/etc/apt/keyrings/scheduled-events-agent.asc
        install -D -m 0644 "$key" "$kept"
        printf '%s\n' 'Types: deb' "URIs: $source/apt" 'Suites: stable' 'Components: main' "Signed-By: $kept" \
            >/etc/apt/sources.list.d/scheduled-events-agent.sources
        update_lists
    else
        kind=rpm
        kept=/etc/pki/rpm-gpg/RPM-GPG-KEY-scheduled-events-agent
        install -D -m 0644 "$key" "$kept"
        rpm --import "$kept"
        folder=/etc/yum.repos.d
        ! command -v zypper >/dev/null || folder=/etc/zypp/repos.d
        printf '%s\n' '[scheduled-events-agent]' 'name=scheduled-events-agent' "baseurl=$source/rpm" \
            'enabled=1' 'autorefresh=1' 'gpgcheck=1' 'repo_gpgcheck=1' "gpgkey=file://$kept" \
            >"$folder/scheduled-events-agent.repo"
    fi
    wanted=scheduled-events-agent is_file=
}

# The name says what it is, without what may follow it in an address, such as a token.
name=${source%%\?*}
name=${name##*/}
kind=${name##*.}
case $kind in
    deb | rpm | whl) get_package ;;
    *) add_repository ;;
esac

agent=/usr/bin/scheduled-events-agent
share=/usr/share/scheduled-events-agent
home=/opt/scheduled-events-agent
if [ "$kind" = whl ]; then
    agent=$home/bin/scheduled-events-agent
    share=$home/share/scheduled-events-agent
fi
before=$("$agent" --version 2>/dev/null) || before=

case $kind in
    deb)
        # Others may be at it while a machine is set up: wait for them. A policy that is there is kept.
        set -- -o DPkg::Lock::Timeout=600 -o Dpkg::Options::=--force-confold install --yes --no-install-recommends
        chmod 0755 "$work" # for apt's own account
        export DEBIAN_FRONTEND=noninteractive
        # A new machine may have no list yet of what the package depends on.
        apt-get "$@" "$wanted" || {
            update_lists
            apt-get "$@" "$wanted"
        }
        ;;
    rpm)
        if command -v dnf >/dev/null; then
            dnf install --assumeyes "$wanted"
        elif command -v tdnf >/dev/null; then
            tdnf install --assumeyes ${is_file:+--nogpgcheck} "$wanted"
        elif command -v zypper >/dev/null; then
            export ZYPP_LOCK_TIMEOUT=600 # as for apt
            zypper --non-interactive install ${is_file:+--allow-unsigned-rpm} "$wanted" ||
                case $? in
                    102 | 103 | 106 | 107) ;; # done, but another repository does not answer, for one
                    *) fail "zypper did not install $name" ;;
                esac
        else
            fail "$name: found neither dnf nor tdnf nor zypper to install it with"
        fi
        ;;
    whl)
        if [ ! -x "$home/bin/pip" ]; then
            # The system's own python3 may be too old, with a newer one beside it.
            for python in python3 python3.14 python3.13 python3.12 python3.11 none; do
                "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
            done
            [ "$python" != none ] || fail "found no Python 3.11 or newer: install one, such as python3.11"
            "$python" -m venv "$home"
        fi
        # PIP_INDEX_URL, PIP_NO_INDEX and PIP_FIND_LINKS say where the libraries come from.
        "$home/bin/pip" install --disable-pip-version-check --quiet "$wanted"
        ;;
esac

# With a bad one this ends here, and an agent that runs goes on with the one from before.
"$agent" check ${policy:+--config "$policy"}

if [ "$kind" = whl ]; then
    ln -sf "$agent" /usr/local/bin/
    ln -sfn "$share" /usr/share/scheduled-events-agent
    cp "$share"/systemd/*.service /etc/systemd/system/
    systemctl daemon-reload
fi

show() { systemctl show --property="$1" --value "$unit"; }

sum_of() { sha256sum <"$1" | cut -d ' ' -f 1; }

write_policy() {
    place=$(realpath -m /etc/scheduled-events-agent/policy.yaml) # a link stays one
    mode=600 group=root
    if [ "$account" != root ]; then
        mode=640 group=$(show Group)
        group=${group:-$(id -gn "$account")}
    fi
    there='' old=''
    if [ -e "$place" ]; then
        there=$(stat -c '%a %U %G' "$place")
        old=$(sum_of "$place")
    fi
    is_chosen= # by an administrator, not by this script or the package
    case $there in
        "" | "600 root root" | "640 root $group" | "640 root scheduled-events-agent") ;;
        "644 root root") [ "$old" = "$(sum_of "$share/policy.yaml")" ] || is_chosen=yes ;;
        *) is_chosen=yes ;;
    esac
    if [ "$old" = "$sum" ] && { [ -n "$is_chosen" ] || [ "$there" = "$mode root $group" ]; }; then return; fi
    mkdir -p "${place%/*}"
    install -m "$mode" -g "$group" "$policy" "$place.new"
    if [ -n "$is_chosen" ]; then
        chown --reference="$place" "$place.new"
        chmod --reference="$place" "$place.new"
    fi
    mv "$place.new" "$place"
}

ask() { # sets what the agent that runs says of itself; the exit code is about events
    # The policy may name another place for the state than the one that the agent has been started with.
    state=$(find "/proc/$(show MainPID)/fd" -lname '*/state.db' -printf '%l\n' -quit 2>/dev/null) || state=
    said=$("$agent" status --json ${state:+--state-dir "${state%/*}"} 2>/dev/null) || :
}

says() { # NAME VALUE
    case $said in *"\"$1\": \"$2\""*) ;; *) return 1 ;; esac
}

reload() {
    systemctl reload "$unit"
    tries=30
    ask
    until says hash "$sum"; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || fail "the agent has not taken the policy over: scheduled-events-agent status says why"
        sleep 1
        ask
    done
}

account=$(show User)
account=${account:-root}
ask
sum=
if [ -n "$policy" ]; then
    sum=$(sum_of "$policy")
    write_policy
fi
systemctl --quiet is-enabled "$unit" || systemctl --quiet enable "$unit"
installed=$("$agent" --version)
is_to_restart=
if ! systemctl --quiet is-active "$unit" || ! says version "${installed##* }"; then
    is_to_restart=yes
elif [ "$(stat -c %U "/proc/$(show MainPID)")" != "$account" ]; then
    is_to_restart=yes # the strict set-up has come or gone meanwhile
elif [ -n "$sum" ] && ! says hash "$sum"; then
    if [ "$before" = "$installed" ]; then reload; else is_to_restart=yes; fi
fi
if [ -n "$is_to_restart" ]; then
    "$share/systemd/restart.sh" systemctl restart "$unit"
else
    late=$(printf '%s\n' "$said" | sed -n '/"needs_restart": \[/,/\]/s/^ *"\(agent\.[a-z_]*\)",*$/\1/p' | paste -s -d ' ')
    [ -z "$late" ] || echo "install.sh: of the policy these keys take effect at the next restart: $late" >&2
fi
