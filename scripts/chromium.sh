#!/usr/bin/env bash
# Install Debian's Chromium, for the tests of the playground where it is missing and that is possible: as root.
#
#   scripts/chromium.sh [required]
#
# Where it cannot be had those tests are skipped; with `required` that is a failure.
set -euo pipefail

say() { printf '==> %s\n' "$*" >&2; }

install_it() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
  say "chromium, for the tests"
  export DEBIAN_FRONTEND=noninteractive
  # Without a font of its own the page's text would be boxes.
  local options=(install --yes --no-install-recommends chromium fonts-dejavu-core)
  apt-get "${options[@]}" || { apt-get update && apt-get "${options[@]}"; }
} >&2

command -v chromium >/dev/null || install_it || say "Chromium cannot be installed here"
if ! command -v chromium >/dev/null; then
  say "Chromium is not there: install the package chromium, or its like, to test the playground"
  [ "${1:-}" != required ]
fi
