# The log. Durable (AOF), never evicting, with a password. Build from the root of the repository.
FROM redis:7-bookworm

RUN mkdir -p /data && chown redis:redis /data
WORKDIR /data
COPY infra/redis/redis.conf infra/redis/start.sh infra/redis/healthy.sh /etc/pagewire/
COPY infra/redis/acl /etc/pagewire/acl

USER redis
VOLUME /data
EXPOSE 6379
HEALTHCHECK --interval=2s --timeout=3s --start-period=30s --retries=5 CMD ["/etc/pagewire/healthy.sh"]
ENTRYPOINT []
CMD ["/etc/pagewire/start.sh"]
