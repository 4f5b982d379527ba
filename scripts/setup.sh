#!/usr/bin/env bash
# Makes .venv: megatron-nsp (editable) with its development tools.
#
#   scripts/setup.sh                 make, refresh or repair .venv; silent when nothing changed
#   scripts/setup.sh --find-python   print the interpreter .venv would be made with
#
# .venv/setup.stamp is written last. A .venv without it was interrupted and is made anew; one made
# by another interpreter or for another folder likewise, since its scripts hold absolute paths.
set -euo pipefail
shopt -s nullglob

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly root=$PWD home=${HOME:-/nonexistent} stamp=.venv/setup.stamp log=.venv/setup.log
readonly system=${SETUP_SYSTEM_ROOT:-} # tests put an empty folder here to hide /usr/local and /opt

say() { printf 'setup: %s\n' "$*"; }

# Prints "VERSION PATH" if $1 runs, is CPython >= 3.12 and can make a venv. An executable may be
# none of that: a pyenv shim of a version that is not selected, a python3 without its venv package.
# PATH is the base interpreter, so that an active .venv is never made anew with its own copy.
probe() {
  "$1" -I -c '
import sys, ensurepip, venv
if sys.version_info < (3, 12) or sys.implementation.name != "cpython":
    sys.exit(1)
print("%d.%d.%d" % sys.version_info[:3], sys._base_executable)
' 2>/dev/null
}

# Prints possible interpreters, one a line, the preferred first.
candidates() {
  local name base data=${XDG_DATA_HOME:-$home/.local/share} conda
  for name in python3.12 python3.13 python3.14 python3 python; do
    type -aP "$name" || true
  done
  for base in "${PYENV_ROOT:-}" "$home/.pyenv"; do
    if [ -n "$base" ]; then printf '%s\n' "$base"/versions/*/bin/python; fi
  done

  conda=$(type -P conda || true)
  for base in "${CONDA_PREFIX:-}" "${CONDA_EXE:-}" "$conda" \
    "$home"/{miniconda3,miniforge3,mambaforge,anaconda3} \
    "$system"/opt/{conda,miniconda3,miniforge3}; do
    base=${base%/bin/conda} base=${base%/condabin/conda}
    if [ -n "$base" ]; then printf '%s\n' "$base/bin/python" "$base"/envs/*/bin/python; fi
  done

  if type -P uv >/dev/null; then
    uv python list --only-installed --offline 2>/dev/null | awk '{ print $2 }' || true
  fi
  printf '%s\n' "${UV_PYTHON_INSTALL_DIR:-$data/uv/python}"/*/bin/python3 \
    "$system"/usr/local/bin/python3.1[2-9] "$system"/usr/local/python*/bin/python3 \
    "$system"/opt/homebrew/bin/python3.1[2-9] "$system"/opt/python/*/bin/python3 \
    "${ASDF_DATA_DIR:-$home/.asdf}"/installs/python/*/bin/python \
    "${MISE_DATA_DIR:-$data/mise}"/installs/python/*/bin/python
}

# Prints "VERSION PATH" of the first candidate that passes the probe.
find_python() {
  local path
  while read -r path; do
    if [ -x "$path" ] && probe "$path"; then return; fi
  done < <(candidates)
  say "no Python >= 3.12 with venv found; install one (apt install python3.12-venv," \
    "pyenv install 3.12 or uv python install 3.12) and run this again" >&2
  return 1
}

# What .venv depends on, in two lines: what needs it made anew, then what needs a new pip run.
wanted_stamp() {
  printf '%s in %s\n%s\n' "$1" "$root" "$(cat pyproject.toml scripts/setup.sh | cksum)"
}

main() {
  local found present="" begin=$SECONDS
  if [ "${1:-}" = --find-python ]; then
    found=$(find_python)
    printf '%s\n' "${found#* }"
    return
  fi

  # A stamp speaks only for an interpreter that still runs.
  if [ -f "$stamp" ] && found=$(probe .venv/bin/python); then
    present=$(<"$stamp")
  fi
  if [ -n "$present" ] && [ "$present" = "$(wanted_stamp "$found")" ]; then return; fi

  if [ "${present%%$'\n'*}" = "${found:-} in $root" ]; then
    say "refreshing .venv, log in $log"
    rm "$stamp"
  else
    found=$(find_python)
    say "making .venv with Python ${found%% *} (${found#* })"
    rm -rf .venv
    "${found#* }" -m venv .venv
    say "installing megatron-nsp and its tools (some minutes the first time), log in $log"
  fi
  if ! .venv/bin/python -m pip install --no-input --disable-pip-version-check --progress-bar off \
    --editable '.[dev]' >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    say "pip failed, its last lines are above, all of them in $log" >&2
    return 1
  fi
  found=$(probe .venv/bin/python)
  wanted_stamp "$found" >"$stamp"
  say "ready after $((SECONDS - begin)) s"
}

main "$@"
