#!/usr/bin/env bash
# Install Node.js and npm, which build the playground, where they are missing and that is possible: as root.
#
#   scripts/node.sh [required]
#
# Nothing else needs them: what is built lies in the repository. Where they cannot be had the test that builds
# it again is skipped; with `required` that is a failure. Debian 13 packages a Node.js that is new enough.
# Debian 12 does not: there it has to be installed from elsewhere before this is run with `required`.
set -euo pipefail

say() { printf '==> %s\n' "$*" >&2; }

is_there() {
  command -v npm >/dev/null && node -e '
    const [major, minor] = process.versions.node.split(".").map(Number);
    process.exit(major > 22 || (major === 22 && minor >= 12) || (major === 20 && minor >= 19) ? 0 : 1)'
}

install_it() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
  say "nodejs and npm, for the playground"
  export DEBIAN_FRONTEND=noninteractive
  local options=(install --yes --no-install-recommends nodejs npm)
  apt-get "${options[@]}" || { apt-get update && apt-get "${options[@]}"; }
} >&2

is_there 2>/dev/null || install_it || say "Node.js cannot be installed here"
if ! is_there 2>/dev/null; then
  found=$(node --version 2>/dev/null || echo none)
  say "The playground is built with Node.js 20.19, 22.12 or newer, and npm; there is $found."
  say "Where the distribution's package is older, as on Debian 12, which has 18, install it otherwise first."
  [ "${1:-}" != required ] || { say "It is required here, so this is a failure."; exit 1; }
fi
