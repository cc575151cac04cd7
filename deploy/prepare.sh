#!/usr/bin/env bash
# Make what compose.yaml needs and no repository has: deploy/.env with passwords, and deploy/secrets.
#
#   deploy/prepare.sh [DIRECTORY]
#
# What is there stays as it is. DIRECTORY is this script's own unless given.
set -euo pipefail
umask 077
here=$(cd "$(dirname "$0")" && pwd)
cd "${1:-$here}"

hex() { od -An -tx1 -N "$1" /dev/urandom | tr -d ' \n'; }

if [ ! -e .env ]; then
  while IFS= read -r line; do
    case $line in
      *_PASSWORD=) printf '%s%s\n' "$line" "$(hex 24)" ;;
      *) printf '%s\n' "$line" ;;
    esac
  done <"$here/.env.example" >.env
  echo "made .env" >&2
fi
# The folder is this user's alone; a container, which runs as another, is shown one file of it.
mkdir -p secrets
secret() {
  [ ! -e "secrets/$1" ] || return 0
  printf '%s\n' "$2" >"secrets/$1"
  chmod 644 "secrets/$1"
  echo "made secrets/$1" >&2
}
for name in admin metrics; do
  secret "$name.key" "nns_$(hex 8)_$(hex 22 | cut -c1-43)"
done
secret grafana.password "$(hex 24)"
