#!/usr/bin/env bash
# Build the image for CPUs with buildah, and try what is in it as the image's user: `make image-check`.
#
#   scripts/image_check.sh [PYTHON_IMAGE]
#
# PYTHON_IMAGE is what to build upon; without, a base is made of Debian's packages, for machines that reach those and
# no registry. Needs Debian or its like, root, and some 12 GB; packages come from where pip and apt are told to look.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly made_base=localhost/nnsight-engine-base image=localhost/nnsight-engine:cpu
base=${1:-}

say() { printf '==> %s\n' "$*" >&2; }

install_tools() {
  local missing=() tool
  for tool in buildah debootstrap; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  [ ${#missing[@]} -eq 0 ] || apt-get install --yes --no-install-recommends "${missing[@]}" >&2
}

make_base() {
  local folder container
  buildah inspect --type image $made_base >/dev/null 2>&1 && return
  say "a base of Debian's packages"
  folder=$(mktemp -d)
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$folder/root" >&2
  container=$(buildah from scratch)
  buildah copy --quiet "$container" "$folder/root" / >/dev/null
  buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
  buildah commit --quiet --rm "$container" $made_base >/dev/null
  rm -rf "$folder"
}

# This machine's ways to packages, for the build alone: what pip is told, folders that it names, certificates.
pip_options() {
  local folder word
  python3 -m pip config list | sed -n "s/^\(global\|install\)\.\([a-z-]*\)='\(.*\)'$/\2 = \3/p" >"$work/settings"
  { echo "[global]"; sed 's|^cert = .*|cert = /etc/host-certificates/ca-certificates.crt|' "$work/settings"; } >"$work/pip.conf"
  echo "--volume=$work/pip.conf:/etc/pip.conf:ro"
  echo "--volume=/etc/ssl/certs:/etc/host-certificates:ro"
  tr ' ' '\n' <"$work/settings" | sed 's|^file://||' | while read -r word; do
    folder=${word%/simple}
    [ "${folder#/}" = "$folder" ] || [ ! -d "$folder" ] || echo "--volume=$folder:$folder:ro"
  done
}

# The image's own user, without an engine for containers, which not every machine can run.
run() { buildah run --isolation=chroot --user=10001:10001 "$tried" -- "$@"; }

clean_up() {
  [ -z "$tried" ] || buildah rm "$tried" >/dev/null
  rm -rf "$work"
}

tried=
work=$(mktemp -d)
trap clean_up EXIT
install_tools
if [ -z "$base" ]; then
  make_base
  base=$made_base
fi
say "the image, on $base"
mapfile -t options < <(pip_options)
buildah bud --layers --format=docker --isolation=chroot --network=host "${options[@]}" \
  --build-arg="PYTHON_IMAGE=$base" --target=cpu --tag=$image . >&2

say "what is in it"
tried=$(buildah from $image)
run nnsight-engine keys create --tenant check | grep --quiet '^nns_'
run python3 -c 'import sys
from app.settings import Settings
from nnsight_engine.modeling.bundled import intact_bundled_model
sys.exit(intact_bundled_model(cache_dir=Settings().bundled_model_dir) is None)'
run sh -c '! touch /opt/written 2>/dev/null'
say "The image is built: its user makes keys, finds the bundled model whole, and writes nowhere but below /data."
