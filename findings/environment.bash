# What each script of this folder sources.
#
# `environment REQUIREMENT...` installs the requirements and sets $python to that environment's Python and $work to an empty folder,
# which is removed at the end. FINDINGS_ENVIRONMENTS=FOLDER keeps environments there: scripts with the same requirements share one.
# FINDINGS_NEWEST=1 drops the versions of the requirements. It ends with 2 if the packages cannot be installed.
# shellcheck shell=bash
set -euo pipefail
export TF_CPP_MIN_LOG_LEVEL=3 TF_ENABLE_ONEDNN_OPTS=0 CUDA_VISIBLE_DEVICES=""
unset KERAS_BACKEND TF_CONFIG TF_USE_LEGACY_KERAS PYTHONPATH PYTHONHOME

environment() {
    local requirements=("$@") folder ready
    [ -z "${FINDINGS_NEWEST:-}" ] || requirements=("${requirements[@]%%==*}")
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    folder=${FINDINGS_ENVIRONMENTS:-$work/environments}/$(printf '%s\n' "${requirements[@]}" | sort | paste -sd _)
    ready=$folder/.ready
    python=$folder/bin/python
    if [ ! -e "$ready" ]; then
        { "${PYTHON:-python3}" -m venv --clear "$folder" && "$python" -m pip install --quiet --quiet "${requirements[@]}" && touch "$ready"; } || {
            echo "Not installed: ${requirements[*]}" >&2
            exit 2
        }
    fi
    [ -z "${FINDINGS_NEWEST:-}" ] || "$python" -m pip list --format freeze | grep -Ei "^($(IFS='|'; echo "${requirements[*]%%[*}"))=="
}

# run_python PROGRAM ARGUMENT...: run $work/PROGRAM and show its errors only if it fails.
run_python() {
    local program=$1
    shift
    "$python" "$work/$program" "$@" 2> "$work/errors" || { tail -n 20 "$work/errors" >&2; exit 1; }
}

# expect_header OUTPUT: print the output, and end with 1 if it is not what the script's header has below "Seen:".
expect_header() {
    echo "$1"
    diff <(sed -n 's/^#     //p' "$0") - <<< "$1" >&2 || { echo "Changed: < is what was seen, > is what happens now." >&2; exit 1; }
}
