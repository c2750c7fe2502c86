# Every request's state and every KV block: no torch, no other service's code. Build from the root of the repository.
FROM python:3.11-slim-bookworm

RUN useradd --uid 10001 --create-home pagewire \
 && python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1
WORKDIR /app

# A further package index, for networks that have their own; pip reads it from the environment.
ARG PIP_EXTRA_INDEX_URL
COPY pyproject.toml constraints.txt ./
COPY infra/docker/requirements.py infra/docker/
RUN python infra/docker/requirements.py scheduler > /tmp/requirements.txt \
 && pip install -qq --no-cache-dir --disable-pip-version-check -c constraints.txt -r /tmp/requirements.txt

COPY infra/docker/lease_check.py infra/docker/
COPY shared shared
COPY services/__init__.py services/
COPY services/scheduler services/scheduler
RUN python -m compileall -q shared services

USER pagewire
HEALTHCHECK --interval=15s --timeout=10s --start-period=60s --retries=3 \
    CMD python infra/docker/lease_check.py scheduler "scheduler-$(hostname)"
CMD ["sh", "-c", "PAGEWIRE_NAME=scheduler-$(hostname) exec python -m services.scheduler"]
