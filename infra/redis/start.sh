#!/bin/sh
# Starts Redis with redis.conf, the password from REDIS_PASSWORD and, of each service whose password is given, its user.
# PAGEWIRE_DURABILITY, as `pagewire up --durability`: what a crash loses. everysec: the last second; always: nothing; none: all.
set -eu
: "${REDIS_PASSWORD:?is not set}"
here=${PAGEWIRE_REDIS_FILES:-/etc/pagewire}
# Clients tell their name by CLIENT SETINFO and do without. Redis 7.0 and 7.1 do not know it and refuse a rule that names it.
case $(redis-server --version) in *v=7.[01].*) unknown=' +client|setinfo' ;; *) unknown='^$' ;; esac
case ${PAGEWIRE_DURABILITY:-everysec} in
  everysec) durability='appendfsync everysec' ;;
  always) durability='appendfsync always' ;;
  none) durability='appendonly no' ;;
  *) echo "PAGEWIRE_DURABILITY is ${PAGEWIRE_DURABILITY}: everysec, always or none" >&2; exit 1 ;;
esac
config() {
  cat "$here/redis.conf"
  echo "$durability"
  echo "requirepass $REDIS_PASSWORD"
  for service in gateway scheduler worker; do
    password=$(printenv "REDIS_$(echo "$service" | tr '[:lower:]' '[:upper:]')_PASSWORD" || true)
    [ -z "$password" ] || echo "$(grep '^user ' "$here/acl/$service.acl" | sed "s/$unknown//") >$password"
  done
}
echo "Redis: $durability (PAGEWIRE_DURABILITY ${PAGEWIRE_DURABILITY:-everysec})"
# What a Redis left that was killed while it rewrote its file: it never deletes that itself, and it holds prompts.
rm -f "${PAGEWIRE_REDIS_DATA:-/data}"/temp-rewriteaof-*.aof "${PAGEWIRE_REDIS_DATA:-/data}"/temp-*.rdb
# Takes this process's place, so that whoever stops it stops Redis.
exec redis-server - "$@" <<END
$(config)
END
