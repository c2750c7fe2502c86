#!/bin/sh
# Exit code 0 if Redis answers and has loaded its data.
[ "$(REDISCLI_AUTH=$REDIS_PASSWORD redis-cli ping)" = PONG ]
