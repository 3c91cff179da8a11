# shellcheck shell=sh
# What the hooks in sh share: log lines, time limits, and the mark on what a hook has stopped. Not a hook itself.
#
# Needs Linux. Install it beside the hooks: each reads it with `. "$(dirname "$0")/common.sh"`, after `set -eu`, and
# ends with "cannot open" and its place if it is not there.
#
#   say TEXT                  a line for the log; fail TEXT: the same as an error, and the hook fails
#   need PROGRAM [VARIABLE]   ends the hook if there is no such program, and names the variable by which it is found or
#                             needed. A hook asks before it does anything; a recover hook starts the service first, and then
#                             asks for the programs that only look at it
#   time_left LIMIT [SPARE]   prints how many seconds the hook may take from now on: LIMIT, but no more than the agent
#                             leaves it, and SPARE (10) less than the event leaves, if these are known; 0 at least
#   within SECONDS COMMAND    runs the command every 0.1 s until it succeeds; fails if it has not in this time
#   try COMMAND               runs it; if it fails, $why has its last words, or says that its time was over, and after how
#                             many seconds
#   ask COMMAND               runs a client that a busy server may leave without an answer: after 15 s again, for a minute
#                             or until 10 s before the event
#   ask_for_a_minute COMMAND  runs a client until its server, which may be restarting, does what is asked; fails after a
#                             minute, or 10 s before the event. What it printed is in $answer
#   answers WHERE             succeeds if it answers: a URL with 2xx, or tcp:HOST:PORT, which accepts; needs python3
#   unit_state                prints what $unit does: runs, starts, stops or does-not-run; ends the hook if systemd does not
#                             know it, and names $unit_variable, which sets it; or if its state is a word of a newer systemd
#   settled_state             the same, when no stop of it is under way any more: a restart may follow the stop, and what
#                             the agent would stop then, it would not start again
#   ask_systemd PROPERTY      prints another property of $unit
#   lives PID                 succeeds if the process is there, and has not ended without its parent's notice
#   main_pid                  prints the process that $pid_file names, or else $unit's; nothing if it does not run
#   unit_processes            prints the processes of $unit, one a line
#   unit_process NAME         prints the first of them with this name; fails if there is none
#
# The mark is the file $mark, in $state_dir by default. A prepare hook sets it before it stops something; a recover hook
# starts only what is marked, and removes the mark. It says for which event, and when what was stopped had been started. If
# that has changed, an administrator has started it since, and its next stop is theirs: in the recovery of another event, or
# on_clear, the mark is void. In that of the same event it is not: a hook that was killed after its start, or a unit that
# ended by itself, looks the same. So until the event is over, the agent brings the service back. To keep it stopped, an
# administrator removes the mark, or masks the unit, and the recover hook fails.
#
#   set_mark                  sets it; with a third line, if $mark_text is set
#   keep_mark                 sets it again after a start, and when the hook fails after all: neither that start nor those
#                             of Restart= are an administrator's
#   stop_marked               stops $unit, and sets the mark before and after
#   holds                     succeeds if there is a mark that holds
#   drop_void_mark            removes one that does not
#   last_start                when it was started; nothing if $pid_file is set; a hook may define another
#   as_mark_owner COMMAND     runs what writes the mark; a hook may define another
#   is_on                     succeeds if $unit runs, or is about to; one that is stopping, or has stopped, is not
#   is_running                succeeds if $unit runs
#   require_mark              ends a recover hook, with success, if its prepare hook has not stopped $unit, or an
#                             administrator has since
#   start_marked              starts $unit, unless it runs, and keeps the mark

name=${0##*/}
say() { printf '%s: %s\n' "$name" "$*"; }
fail() { say "$*" >&2; exit 1; }
need() { command -v "$1" >/dev/null || fail "$1 is not found: see ${2:-PATH}"; }

# The shell of some systems (bash) evaluates text in arithmetic, commands in it included: what is no number is dropped.
digits=0123456789 # in some languages a range such as 0-9 has more
is_number() { # nothing; 0; one to ten digits without a leading zero
    case $1 in 0) ;; 0* | *[!$digits]* | ???????????*) return 1 ;; esac
}
is_duration() { # also -1, and 6.5
    case $1 in
        -1) ;;
        ?*.?*) is_number "${1%%.*}" && case ${1#*.} in *[!$digits]*) return 1 ;; esac ;;
        *) is_number "$1" ;;
    esac
}
is_number "${SCHEDULED_EVENT_SECONDS_LEFT:-}" || unset SCHEDULED_EVENT_SECONDS_LEFT
is_number "${SCHEDULED_EVENT_TIMEOUT_SECONDS:-}" || unset SCHEDULED_EVENT_TIMEOUT_SECONDS
is_duration "${SCHEDULED_EVENT_DURATION_SECONDS:-}" || unset SCHEDULED_EVENT_DURATION_SECONDS

# Not the clock: it may be set while a hook waits, after a freeze above all.
uptime() { read -r up _ </proc/uptime && echo "${up%%.*}"; }
began=$(uptime)

# A unit of the hook's own has a place where only root can write; the agent's belongs to the agent's account.
# shellcheck disable=SC2034  # the hooks have their marks there
state_dir=${STATE_DIRECTORY:-/var/lib/scheduled-events-agent}
state_dir=${state_dir%%:*} # a drop-in may have added another

timeout() { command timeout -k 5 "$@"; } # a client may outlive SIGTERM

time_left() {
    left=$1
    if [ -n "${SCHEDULED_EVENT_SECONDS_LEFT:-}" ]; then
        event_leaves=$((SCHEDULED_EVENT_SECONDS_LEFT - ${2:-10} - $(uptime) + began))
        if [ "$event_leaves" -lt "$left" ]; then left=$event_leaves; fi
    fi
    if [ -n "${SCHEDULED_EVENT_TIMEOUT_SECONDS:-}" ]; then
        agent_leaves=$((SCHEDULED_EVENT_TIMEOUT_SECONDS - $(uptime) + began))
        if [ "$agent_leaves" -lt "$left" ]; then left=$agent_leaves; fi
    fi
    echo $((left > 0 ? left : 0))
}

within() {
    until=$(($(uptime) + $1))
    shift
    while ! "$@"; do
        [ "$(uptime)" -lt "$until" ] || return 1
        sleep 0.1
    done
}

try() {
    tried_at=$(uptime)
    code=0
    why=$("$@" 2>&1) || code=$?
    tried="after $(($(uptime) - tried_at)) s"
    case $code in
        0) if [ -n "$why" ]; then printf '%s\n' "$why"; fi ;;
        124 | 137) why="not done $tried" ;;
        *) why="$(printf %s "${why:-exit code $code}" | tr '\n' ' ') ($tried)" ;;
    esac
    return "$code"
}

ask() {
    ask_until=$(($(uptime) + $(time_left 60)))
    while :; do
        code=0
        timeout 15 "$@" || code=$?
        case $code in 124 | 137) ;; *) return "$code" ;; esac # 137: it was killed
        [ "$(uptime)" -lt "$ask_until" ] || return "$code"
        say "$1 does not answer; asking again" >&2
    done
}

ask_for_a_minute() {
    give_up_at=$(($(uptime) + $(time_left 60)))
    until answer=$("$@"); do
        case $answer in *"not found"*) fail "$answer" ;; esac # a wrong name, says scontrol
        [ "$(uptime)" -lt "$give_up_at" ] || fail "gave up: $*"
        say "did not succeed, and is tried again: $*" >&2
        sleep 5
    done
}

answers() {
    timeout 10 python3 -ISc 'import sys
where = sys.argv[1]
if where.startswith("tcp:"):
    import socket
    host, _, port = where[4:].rpartition(":")
    socket.create_connection((host, int(port)), 5)
else:
    import urllib.request as r
    r.build_opener(r.ProxyHandler({})).open(where, timeout=5)' "$1"
}

# Of a unit that does not exist, ActiveState is inactive.
unit_state() {
    properties=$(systemctl show --property=LoadState,ActiveState "${unit:?}") || properties=
    case $properties in
        *LoadState=not-found* | *LoadState=bad-setting* | *LoadState=error*)
            fail "systemd does not know $unit: set ${unit_variable:?}"
            ;;
        *ActiveState=*) ;;
        *) fail "systemctl does not report the state of $unit: see ${unit_variable:?}" ;;
    esac
    state_word=$(printf '%s\n' "$properties" | sed -n 's/^ActiveState=//p')
    case $state_word in
        active | reloading | refreshing) echo runs ;;
        activating) echo starts ;;
        deactivating) echo stops ;;
        inactive | failed | maintenance) echo does-not-run ;;
        *) fail "whether $unit runs is not known: systemd says \"$state_word\"" ;;
    esac
}
is_not_stopping() {
    unit_is=$(unit_state) || exit 1
    [ "$unit_is" != stops ]
}
settled_state() {
    within "$(time_left 300)" is_not_stopping || fail "$unit is still stopping"
    printf '%s\n' "$unit_is"
}
ask_systemd() { TZ=UTC systemctl show --property="$1" --value "${unit:?}"; }
lives() { grep -qs '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$1/status"; }
main_pid() {
    if [ -n "${pid_file:-}" ]; then
        pid=$(cat "$pid_file" 2>/dev/null) || pid=
        if [ -n "$pid" ] && lives "$pid"; then echo "$pid"; fi
    else
        pid=$(ask_systemd MainPID) || return 1
        if [ "$pid" != 0 ]; then echo "$pid"; fi
    fi
}
unit_processes() {
    group=$(ask_systemd ControlGroup)
    [ -n "$group" ] || return 0
    for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/systemd; do # of version 2; of version 1
        [ ! -d "$hierarchy$group" ] || find "$hierarchy$group" -name cgroup.procs -exec cat {} +
    done
}
unit_process() {
    for process in $(unit_processes); do
        if [ "$(cat "/proc/$process/comm" 2>/dev/null)" = "$1" ]; then
            echo "$process"
            return
        fi
    done
    return 1
}

last_start() { [ -n "${pid_file:-}" ] || ask_systemd ActiveEnterTimestamp; }
as_mark_owner() { "$@"; }

mark_text=
set_mark() {
    mark_start=$(last_start) || fail "when it was started is not known; no mark was set: ${mark:?}"
    printf '%s\n' "${SCHEDULED_EVENT_ID:-by-hand}" "$mark_start" "$mark_text" |
        as_mark_owner tee "${mark:?}.$$" >/dev/null || {
        as_mark_owner rm -f "$mark.$$" || : # on a full disk it is empty
        fail "the mark cannot be written: $mark"
    }
    as_mark_owner sync "$mark.$$"
    as_mark_owner mv "$mark.$$" "$mark"
    as_mark_owner sync "${mark%/*}"
}

keep_mark() {
    mark_text=$(sed -n 3p "$mark")
    (set_mark) || :
    trap 'if [ $? -ne 0 ] && [ -e "$mark" ]; then (set_mark) || :; fi' EXIT
    trap 'exit 143' TERM
}

holds() {
    [ -e "$mark" ] || return 1
    [ "$(sed -n 1p "$mark")" != "${SCHEDULED_EVENT_ID:-}" ] || return 0
    started=$(last_start)
    [ -z "$started" ] || [ "$started" = "$(sed -n 2p "$mark")" ]
}

stop_marked() {
    set_mark
    systemctl stop "$unit"
    set_mark # a start that a restart began just before the stop is not an administrator's
}

drop_void_mark() { if [ -e "$mark" ] && ! holds; then as_mark_owner rm -f "$mark"; fi; }

is_on() {
    unit_is=$(unit_state) || exit 1
    case $unit_is in runs | starts) ;; *) return 1 ;; esac
}
is_running() {
    unit_is=$(unit_state) || exit 1
    [ "$unit_is" = runs ]
}
require_mark() {
    if [ ! -e "$mark" ]; then
        say "not stopped by ${name%-recover}-prepare: left as it is"
        exit 0
    fi
    if ! is_on && ! holds; then
        as_mark_owner rm -f "$mark"
        say "$unit was started and stopped since then: left as it is"
        exit 0
    fi
}
start_marked() {
    if is_running; then return 0; fi
    systemctl start "$unit"
    if [ -e "$mark" ]; then keep_mark; fi
}
