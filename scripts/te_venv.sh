#!/usr/bin/env bash
# Makes .te-venv: Transformer Engine with its torch extension built here, flash-attn 4, and the
# sources of flash-attn 2 and 3, for `make te`. No GPU is needed, a CUDA 13 toolkit is (its nvcc is
# asked for its version). The build takes about 20 minutes on two cores, once.
#
#   scripts/te_venv.sh               make or refresh .te-venv; silent when nothing changed
#
# .te-venv/te.stamp is written last; what pip finds installed already is not built again.
# MAX_JOBS sets how many files are compiled at once.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly venv=$PWD/.te-venv stamp=.te-venv/te.stamp log=.te-venv/te.log
readonly torch=torch==2.14.1
readonly te='transformer-engine[core_cu13,pytorch]==2.20.2'
readonly flash_2=2.8.3.post2 flash_4=flash-attn-4==4.0.0b36
readonly cuda=${CUDA_HOME:-/usr/local/cuda}

say() { printf 'te_venv: %s\n' "$*"; }

install() {
  "$venv/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off "$@"
}

# Compiles 33 C++ files against torch; the CUDA kernels come in a wheel.
build_te() {
  local site
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # Without force it would look for a wheel of some other torch first.
  CUDA_HOME=$cuda NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=${MAX_JOBS:-$(nproc)} \
    CPATH=$site/nvidia/cu13/include:$site/nvidia/cudnn/include:$site/nvidia/nccl/include \
    install --no-build-isolation "$te"
}

# The Python of flash-attn 2 and 3 (its folder hopper) is read, never built.
unpack_flash_sources() {
  local sources=$venv/flash-attn
  if [ -d "$sources" ]; then return; fi
  mkdir "$sources.part"
  FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE CUDA_HOME=$cuda "$venv/bin/python" -m pip download \
    --no-input --disable-pip-version-check --no-deps --no-build-isolation \
    --no-binary flash-attn --dest "$sources.part" "flash-attn==$flash_2"
  tar -xzf "$sources.part"/*.tar.gz -C "$sources.part" --strip-components=1
  rm "$sources.part"/*.tar.gz
  mv "$sources.part" "$sources"
}

make_venv() {
  install "$torch" --editable . pytest hypothesis setuptools wheel packaging ninja pybind11
  build_te
  install "$flash_4" "$torch"
  rm -rf "$venv/flash-attn.part"
  unpack_flash_sources
}

main() {
  local wanted begin=$SECONDS
  wanted="$PWD $(cat pyproject.toml scripts/te_venv.sh | cksum)"
  if [ -f "$stamp" ] && [ "$(<"$stamp")" = "$wanted" ]; then return; fi
  if [ ! -x "$cuda/bin/nvcc" ]; then
    say "$cuda/bin/nvcc is not there; set CUDA_HOME to a CUDA 13 toolkit" >&2
    return 1
  fi
  if [ "$(head -n 1 .te-venv/folder 2>/dev/null)" != "$PWD" ]; then
    rm -rf "$venv"
    "$(bash scripts/setup.sh --find-python)" -m venv "$venv"
    printf '%s\n' "$PWD" >.te-venv/folder
  fi
  rm -f "$stamp"
  say "building Transformer Engine into .te-venv (20 minutes the first time), log in $log"
  if ! make_venv >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    say "failed, the last lines are above, all of them in $log" >&2
    return 1
  fi
  printf '%s\n' "$wanted" >"$stamp"
  say "ready after $((SECONDS - begin)) s"
}

main "$@"
