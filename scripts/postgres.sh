#!/usr/bin/env bash
# Install PostgreSQL for the tests where there is none and that is possible: on Debian and its like, as root.
#
#   scripts/postgres.sh [required]
#
# The tests start a server of their own in a temporary folder. Where PostgreSQL cannot be had they are skipped;
# with `required` that is a failure.
set -euo pipefail

say() { printf '==> %s\n' "$*" >&2; }

is_there() { command -v initdb >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null; }

install_it() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
  say "postgresql, for the tests"
  export DEBIAN_FRONTEND=noninteractive UCF_FORCE_CONFFOLD=1
  # The package would also begin a server of the machine's own, which nobody has asked for.
  mkdir -p /etc/postgresql-common
  [ -e /etc/postgresql-common/createcluster.conf ] ||
    echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.conf
  local options=(install --yes --no-install-recommends postgresql)
  apt-get "${options[@]}" || { apt-get update && apt-get "${options[@]}"; }
} >&2

is_there || install_it || say "PostgreSQL cannot be installed here"
if ! is_there; then
  say "PostgreSQL is not there: install the package postgresql, or its like, to run the tests on it"
  [ "${1:-}" != required ]
fi
