#!/usr/bin/env bash
# Build the image for CPUs and run it as a cluster would, with buildah and podman: `make image-check`.
#
#   scripts/image_check.sh [PYTHON_IMAGE]
#
# PYTHON_IMAGE is what to build upon; without, a base is made of Debian's packages, for machines that reach those and
# no registry. Needs Debian or its like, root, and some 12 GB; packages come from where pip and apt are told to look.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly made_base=localhost/nnsight-engine-base image=localhost/nnsight-engine:cpu name=nnsight-engine-check
readonly port=18437
base=${1:-}

say() { printf '==> %s\n' "$*" >&2; }

install_tools() {
  local missing=() tool
  for tool in buildah podman debootstrap crun; do
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

# As a pod has it: no capabilities, no new privileges, a root that cannot be written.
container() {
  podman run --read-only --cap-drop=all --security-opt=no-new-privileges --network=host --cgroups=disabled \
    --volume="$name:/data" --tmpfs=/tmp:mode=1777 --shm-size=1g --env=NNSIGHT_ENGINE_HOST=127.0.0.1 "$@"
}

ask() { curl --silent --show-error --fail-with-body --max-time 60 "http://127.0.0.1:$port$1" "${@:2}"; }

clean_up() {
  podman rm --force --time 30 "$name" >/dev/null 2>&1 || true
  podman volume rm --force "$name" >/dev/null 2>&1 || true
  rm -rf "$work"
}

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

say "a key, and the server"
key=$(container --rm $image keys create --tenant check --scopes completions,interventions,code)
# An address of its own would need a network to be made; tests listen to this machine alone.
container --detach --name="$name" --env=NNSIGHT_ENGINE_PORT=$port $image serve --max-model-len 512 >/dev/null
for ((second = 0; second < 180; second++)); do
  ask /health/ready >/dev/null 2>&1 && break
  sleep 1
done
podman logs "$name" >&2
answer=$(ask /v1/completions -H "Authorization: Bearer $key" -H 'Content-Type: application/json' \
  -d '{"prompt": "The Eiffel Tower is in the city of", "max_tokens": 1, "temperature": 0,
       "interventions": [{"op": "trace", "name": "t", "code": "kept = save(model.layers[5].output[-1].shape[-1])"}]}')
grep --quiet '" Paris"' <<<"$answer"
grep --quiet --extended-regexp '"kept": ?576' <<<"$answer" # strangers' code has its sandbox
podman healthcheck run "$name"
podman exec "$name" sh -c '! touch /opt/written 2>/dev/null && [ "$(id -u)" = 10001 ]'

say "its end"
podman stop --time 60 "$name" >/dev/null
[ "$(podman inspect --format '{{.State.ExitCode}}' "$name")" = 0 ]
say "The image works: it answered as a user without rights, on a root that cannot be written, and ended when told to."
