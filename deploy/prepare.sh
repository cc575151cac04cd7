#!/usr/bin/env bash
# Make what compose.yaml needs and no repository has: deploy/.env with passwords, and keys in deploy/secrets.
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
for name in admin metrics; do
  if [ ! -e "secrets/$name.key" ]; then
    printf 'nns_%s_%s\n' "$(hex 8)" "$(hex 22 | cut -c1-43)" >"secrets/$name.key"
    chmod 644 "secrets/$name.key"
    echo "made secrets/$name.key" >&2
  fi
done
