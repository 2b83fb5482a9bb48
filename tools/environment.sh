# Sourced by run.sh, test.sh and .ci/run in the checkout's root: a virtual environment in .venv.

prepare_environment() {
    command -v "${CC:-cc}" >/dev/null 2>&1 || {
        echo "A C compiler is needed and '${CC:-cc}' was not found." >&2
        echo "Debian, Ubuntu: apt-get install gcc libc6-dev    Fedora: dnf install gcc" >&2
        exit 1
    }
    command -v python3 >/dev/null 2>&1 || {
        echo "Python 3.10 or later is needed (Debian, Ubuntu: apt-get install python3 python3-venv)." >&2
        exit 1
    }
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "Python 3.10 or later is needed; this is $(python3 --version)." >&2
        exit 1
    }
    if [ ! -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        echo '== making .venv'
        rm -rf .venv
        python3 -m venv .venv || {
            rm -rf .venv
            echo "python3 cannot make a virtual environment with pip in it." >&2
            echo "Debian, Ubuntu: apt-get install python3-venv" >&2
            exit 1
        }
    fi
    PATH="$PWD/.venv/bin:$PATH"
    export PATH
    # Installed once for each list of packages, so that later runs need no network.
    for package in "$@"; do
        grep -qx "$package" .venv/installed 2>/dev/null || {
            echo "== installing $*"
            python -m pip install --quiet --disable-pip-version-check "$@"
            printf '%s\n' "$@" >>.venv/installed
            break
        }
    done
}

# The bundled checkpoint as a container in build/model, unless it is there already.
bundled_container() {
    [ -f build/model/manifest.json ] && [ ! -f build/model/conversion.log ] && return
    echo '== converting models/tiny-qwen3.5-moe into build/model'
    PYTHONPATH=tools python -m headrace_tools.convert.cli models/tiny-qwen3.5-moe build/model
}
