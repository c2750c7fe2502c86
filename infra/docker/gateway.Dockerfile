# HTTP and text: no torch, no other service's code. Build from the root of the repository.
FROM python:3.11-slim-bookworm

RUN useradd --uid 10001 --create-home pagewire \
 && python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1
WORKDIR /app

# A further package index, for networks that have their own; pip reads it from the environment.
ARG PIP_EXTRA_INDEX_URL
COPY pyproject.toml constraints.txt ./
COPY infra/docker/requirements.py infra/docker/
RUN python infra/docker/requirements.py gateway > /tmp/requirements.txt \
 && pip install -qq --no-cache-dir --disable-pip-version-check -c constraints.txt -r /tmp/requirements.txt

COPY shared shared
COPY services/__init__.py services/
COPY services/gateway services/gateway
RUN python -m compileall -q shared services

USER pagewire
EXPOSE 8000
ENV PAGEWIRE_HOST=0.0.0.0 PAGEWIRE_PORT=8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/live', timeout=4)"]
CMD ["sh", "-c", "PAGEWIRE_NAME=gateway-$(hostname) exec python -m services.gateway"]
