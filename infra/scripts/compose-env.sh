#!/usr/bin/env bash
# Writes .env for docker-compose.yml with fresh passwords for Redis and an API key, unless they are there.
set -euo pipefail
cd "$(dirname "$0")/../.."
for name in REDIS_PASSWORD REDIS_GATEWAY_PASSWORD REDIS_SCHEDULER_PASSWORD REDIS_WORKER_PASSWORD PAGEWIRE_API_KEY; do
  if ! grep -qs "^$name=." .env; then
    (umask 077; echo "$name=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')" >>.env)
    echo "wrote a new $name to .env"
  fi
done
