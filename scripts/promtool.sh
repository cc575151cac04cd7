#!/usr/bin/env bash
# Install promtool, of Debian's package prometheus, for the tests where it is missing and that is possible: as root.
#
#   scripts/promtool.sh [required]
#
# It checks the alert rules in deploy/prometheus. Where it cannot be had those tests are skipped; with `required`
# that is a failure.
set -euo pipefail

say() { printf '==> %s\n' "$*" >&2; }

install_it() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
  say "promtool, for the tests"
  export DEBIAN_FRONTEND=noninteractive UCF_FORCE_CONFFOLD=1
  local options=(install --yes --no-install-recommends prometheus)
  # The package would also begin a server of the machine's own, which nobody has asked for.
  local forbid=/usr/sbin/policy-rc.d had=
  [ -e "$forbid" ] && had=1 || printf '#!/bin/sh\nexit 101\n' | install -m 755 /dev/stdin "$forbid"
  local status=0
  apt-get "${options[@]}" || { apt-get update && apt-get "${options[@]}"; } || status=$?
  [ -n "$had" ] || rm -f "$forbid"
  return "$status"
} >&2

command -v promtool >/dev/null || install_it || say "promtool cannot be installed here"
if ! command -v promtool >/dev/null; then
  say "promtool is not there: install the package prometheus, or its like, to check the alert rules"
  [ "${1:-}" != required ]
fi
