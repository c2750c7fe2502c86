# Weights, KV cache, kernels. Also the image that fetches the model. Build from the root of the repository.
FROM python:3.11-slim-bookworm AS kernels
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++
WORKDIR /app
COPY kernels kernels
RUN python -m kernels.native.build

FROM python:3.11-slim-bookworm

RUN useradd --uid 10001 --create-home pagewire \
 && python -m venv /opt/venv \
 && install -d -o pagewire -g pagewire /models
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1
WORKDIR /app

# PyPI's torch carries CUDA (gigabytes). For a small CPU image name the CPU index of PyTorch here.
ARG PIP_EXTRA_INDEX_URL
ARG EXTRAS="gpu-worker"
COPY pyproject.toml constraints.txt ./
COPY infra/docker/requirements.py infra/docker/
RUN python infra/docker/requirements.py $EXTRAS > /tmp/requirements.txt \
 && pip install -qq --no-cache-dir --disable-pip-version-check -c constraints.txt -r /tmp/requirements.txt

# On a GPU Triton builds a small launcher for the driver with the machine's C compiler.
RUN case " $EXTRAS " in *" gpu "*) apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev \
      && rm -rf /var/lib/apt/lists/* ;; esac

COPY infra/docker/lease_check.py infra/docker/
COPY shared shared
COPY kernels kernels
COPY --from=kernels /app/kernels/native/lib kernels/native/lib
COPY services/__init__.py services/
COPY services/gpu_worker services/gpu_worker
RUN python -m compileall -q shared kernels services

USER pagewire
VOLUME /models
ENV PAGEWIRE_HOME=/models
HEALTHCHECK --interval=15s --timeout=10s --start-period=300s --retries=3 \
    CMD python infra/docker/lease_check.py gpu_worker "worker-$(hostname)"
CMD ["sh", "-c", "PAGEWIRE_NAME=worker-$(hostname) exec python -m services.gpu_worker"]
