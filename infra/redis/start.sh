#!/bin/sh
# Starts Redis with redis.conf and the password from REDIS_PASSWORD.
set -eu
: "${REDIS_PASSWORD:?is not set}"
{ cat /etc/pagewire/redis.conf; echo "requirepass $REDIS_PASSWORD"; } | exec redis-server -
