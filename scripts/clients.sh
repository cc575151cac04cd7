#!/usr/bin/env bash
# Install clients of other projects, for tests/e2e/test_clients.py, into an environment of their own: .venv-clients.
#
#   scripts/clients.sh PYTHON [required]
#
# They need other versions of some packages than the server. Where they cannot be had those tests are skipped;
# with `required` that is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '==> %s\n' "$*" >&2; }

venv=.venv-clients
stamp=$venv/.installed-$(sha256sum <requirements/clients.txt | cut -c1-16)

install_them() {
  say "clients, for the tests"
  "$1" -m venv --clear $venv && $venv/bin/python -m pip install --quiet --no-deps -r requirements/clients.txt && touch "$stamp"
} >&2

[ -e "$stamp" ] || install_them "${1:?usage: scripts/clients.sh PYTHON [required]}" || rm -rf $venv
if [ ! -e "$stamp" ]; then
  say "The clients of requirements/clients.txt cannot be installed here."
  [ "${2:-}" != required ]
fi
