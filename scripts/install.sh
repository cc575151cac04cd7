#!/usr/bin/env bash
# Install the locked CPU stack and this project, editable, into the virtual environment given.
#
#   scripts/install.sh VENV [--packages-only | --project-only] [REQUIREMENTS...]
#
# REQUIREMENTS default to requirements/cpu.txt and requirements/dev.txt. Everything goes in with --no-deps: the
# lock is complete, and resolving would bring in torchvision, torchaudio and torchcodec, whose index builds are
# for CUDA and break `import transformers` beside CPU torch.
set -euo pipefail

venv=${1:?usage: scripts/install.sh VENV [--packages-only | --project-only] [REQUIREMENTS...]}
shift
venv=$(cd "$venv" && pwd)
cd "$(dirname "$0")/.."
python=$venv/bin/python

say() { printf '==> %s\n' "$*" >&2; }

# A CPU build of torch may lie where pip is told to look. Elsewhere only PyTorch's own index has it, whose
# address uv knows.
install_torch() {
  local torch=$1 complaint
  say "$torch"
  complaint=$(mktemp)
  if ! "$python" -m pip install --no-deps "$torch" 2>"$complaint"; then
    say "pip found no $torch; fetching it from PyTorch's CPU index with uv"
    "$python" -m pip install -r requirements/uv.txt
    if ! "$venv/bin/uv" pip install --python "$python" --no-deps --torch-backend=cpu "$torch"; then
      say "Neither pip nor uv could install $torch. What pip said:"
      cat "$complaint" >&2
      rm -f "$complaint"
      return 1
    fi
  fi
  rm -f "$complaint"
}

install_packages() {
  local requirements=() file torch
  if [ "$(uname -sm)" != "Linux x86_64" ]; then
    say "The lock is made for Linux x86_64, this is $(uname -sm): if a package is missing below, use the Dockerfile."
  fi
  for file in "$@"; do requirements+=(-r "$file"); done
  say "pip"
  "$python" -m pip install -r requirements/installer.txt
  torch=$(cat "$@" | grep -m1 '^torch==' || true)
  [ -z "$torch" ] || install_torch "$torch"
  say "$*"
  "$python" -m pip install --no-deps "${requirements[@]}"
}

install_project() {
  say "nnsight-engine"
  "$python" -m pip install --no-deps --no-build-isolation --editable .
}

packages=yes
project=yes
case ${1:-} in
  --packages-only) project=no; shift ;;
  --project-only) packages=no; shift ;;
esac
[ $# -gt 0 ] || set -- requirements/cpu.txt requirements/dev.txt
[ $packages = no ] || install_packages "$@"
[ $project = no ] || install_project
