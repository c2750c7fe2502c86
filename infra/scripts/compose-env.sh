#!/usr/bin/env bash
# Writes .env for docker-compose.yml with a fresh password for Redis, unless there is one.
set -euo pipefail
cd "$(dirname "$0")/../.."
if ! grep -qs '^REDIS_PASSWORD=.' .env; then
  (umask 077; echo "REDIS_PASSWORD=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')" >>.env)
  echo "wrote a new password for Redis to .env"
fi
