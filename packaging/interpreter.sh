# shellcheck shell=sh
# Which Python runs the agent: sourced by the launcher and by bytecode.sh, so that both choose the same one.

# Sets python to its path and abi to its name in the directory of the compiled modules (cp311). Fails when none
# will do. What was found and is no use is in found, for a message.
find_python() {
    found=
    # Not PATH: the service and every shell must get the same one. And the distribution's comes first: it is
    # what the package depends on, and has all its modules.
    for _place in /usr/bin /usr/local/bin; do
        for _name in python3 python3.14 python3.13 python3.12 python3.11; do
            [ -x "$_place/$_name" ] || continue
            # The name of the file tells the version in a tenth of the time that asking takes.
            _version=$(readlink -f "$_place/$_name") || continue
            _version=${_version##*/python}
            case $_version in
                3.[0-9] | 3.[0-9][0-9]) ;;
                *)
                    # abiflags tell a free-threaded build ("3.13t"), for which no modules are shipped.
                    _version=$("$_place/$_name" -I -S -c 'import sys
print("" if sys.implementation.name == "cpython" else sys.implementation.name + " ", end="")
print("%d.%d%s" % (*sys.version_info[:2], sys.abiflags))' 2>/dev/null) || _version="does not start"
                    ;;
            esac
            case $_version in
                3.11 | 3.12 | 3.13 | 3.14)
                    # shellcheck disable=SC2034  # the script that sources this uses both
                    python=$_place/$_name abi=cp3${_version#3.}
                    return 0
                    ;;
            esac
            found="${found:+$found, }$_place/$_name ($_version)"
        done
    done
    return 1
}
