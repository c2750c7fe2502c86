#!/usr/bin/env bash
# Builds the images, starts the four containers, waits until all are healthy, streams one chat, takes everything down.
# Without a registry, BASE_IMAGES_SCRIPT names a program that makes the base images, given their names.
set -euo pipefail
cd "$(dirname "$0")/../.."

bases=(python:3.11-slim-bookworm redis:7-bookworm)
services=(redis scheduler gpu_worker gateway)
port=${COMPOSE_TEST_PORT:-18000}
export PAGEWIRE_PUBLISH=127.0.0.1:$port
secrets=(REDIS_PASSWORD REDIS_GATEWAY_PASSWORD REDIS_SCHEDULER_PASSWORD REDIS_WORKER_PASSWORD PAGEWIRE_API_KEY)
for name in "${secrets[@]}"; do
  export "$name=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')"
done

[ -z "${BASE_IMAGES_SCRIPT:-}" ] || "$BASE_IMAGES_SCRIPT" "${bases[@]}"
docker info >/dev/null 2>&1 || { echo "error: no Docker engine answers" >&2; exit 1; }
if docker compose version >/dev/null 2>&1; then compose=(docker compose); else compose=(docker-compose); fi
compose+=(-p pagewire-test)

health() { docker inspect -f '{{.State.Health.Status}}' "$("${compose[@]}" ps -q "$1")"; }

finish() {
  status=$?
  [ "$status" -eq 0 ] || "${compose[@]}" logs --tail 60 || true
  "${compose[@]}" down -v --remove-orphans >/dev/null 2>&1 || true
  [ "$status" -eq 0 ] && echo "compose-test passed" || echo "compose-test failed" >&2
}
trap finish EXIT

"${compose[@]}" build
"${compose[@]}" up -d

for service in "${services[@]}"; do
  for _ in $(seq 150); do
    [ "$(health "$service")" != healthy ] || break
    sleep 2
  done
  echo "$service: $(health "$service"), user $("${compose[@]}" exec -T "$service" id -un)"
  [ "$(health "$service")" = healthy ]
  [ "$("${compose[@]}" exec -T "$service" id -u)" != 0 ]
done
for service in scheduler gateway; do
  "${compose[@]}" exec -T "$service" python -c \
    'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is not None)'
done
python3 tests/e2e/compose/stream_chat.py "http://127.0.0.1:$port"
