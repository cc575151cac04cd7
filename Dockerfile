# syntax=docker/dockerfile:1
# NNsight Engine in a container; docs/deploying.md says how to run it.
#
#   docker build --target cpu -t nnsight-engine:cpu .
#   docker build --target gpu -t nnsight-engine:gpu .
#
# For a build that can be repeated, pin what is built upon: --build-arg PYTHON_DIGEST=@sha256:…
#
# The images run as user 10001 with a root that may be read-only: whatever is written lies below /data, which a
# volume is for, and /tmp.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG PYTHON_DIGEST=
ARG GPU_IMAGE=vllm/vllm-openai:v0.32.0
ARG GPU_DIGEST=

# ---- cpu-build: compilers, the locked packages, the converted model ---------------------------------------------------
FROM ${PYTHON_IMAGE}${PYTHON_DIGEST} AS cpu-build
# The compiler stays here: wheels bring everything that runs.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/nnsight-engine
RUN python3 -m venv .venv
COPY requirements/cpu.txt requirements/installer.txt requirements/uv.txt requirements/
COPY scripts/install.sh scripts/
# The packages come before our sources, so that a change of ours does not install 3 GB again.
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=cache,target=/root/.cache/uv \
    scripts/install.sh .venv --packages-only requirements/cpu.txt
COPY pyproject.toml README.md LICENSE ./
COPY api_schemas api_schemas
COPY app app
COPY nnsight_engine nnsight_engine
RUN scripts/install.sh .venv --project-only && .venv/bin/python -m compileall -q api_schemas app nnsight_engine
RUN XDG_CACHE_HOME=/opt .venv/bin/python -m nnsight_engine.modeling.bundled && chmod -R a+rX .

# ---- cpu: the server with the bundled model ---------------------------------------------------------------------------
FROM ${PYTHON_IMAGE}${PYTHON_DIGEST} AS cpu
# vLLM on CPU compiles kernels with g++ when asked for --compile, and reads the core layout through libnuma; tini
# passes signals on while Python still imports, and collects processes that nobody waits for.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libnuma1 tini && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --home-dir /data --no-create-home engine \
    && install --directory --owner=engine --group=engine --mode=700 /data
COPY --from=cpu-build /opt/nnsight-engine /opt/nnsight-engine
ENV PATH=/opt/nnsight-engine/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    USER=engine \
    HOME=/data \
    XDG_CACHE_HOME=/data/cache \
    NUMBA_CACHE_DIR=/data/cache/numba \
    TORCHINDUCTOR_CACHE_DIR=/data/cache/torchinductor \
    TRITON_CACHE_DIR=/data/cache/triton \
    HF_HOME=/data/models \
    VLLM_CPU_KVCACHE_SPACE=1 \
    NNSIGHT_ENGINE_HOST=0.0.0.0 \
    NNSIGHT_ENGINE_LOG_FORMAT=json \
    NNSIGHT_ENGINE_DATA_DIR=/data/server \
    NNSIGHT_ENGINE_RESULT_DIR=/data/results \
    NNSIGHT_ENGINE_BUNDLED_MODEL_DIR=/opt/nnsight-engine
VOLUME /data
USER 10001:10001
WORKDIR /data
EXPOSE 8000
# Live, not ready: whoever acts on an image's health ends what is not healthy, and loading a model is no reason to.
HEALTHCHECK --interval=10s --timeout=3s --start-period=90s --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:%s/health/live' % os.environ.get('NNSIGHT_ENGINE_PORT', 8000), timeout=2)"]
ENTRYPOINT ["tini", "--", "nnsight-engine"]
CMD ["serve"]

# ---- gpu: our packages on vLLM's own image ----------------------------------------------------------------------------
FROM ${GPU_IMAGE}${GPU_DIGEST} AS gpu
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends tini && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --home-dir /data --no-create-home engine \
    && install --directory --owner=engine --group=engine --mode=700 /data
WORKDIR /opt/nnsight-engine
COPY requirements/gpu.txt requirements/
# vLLM, torch and what they need are in the base and stay as they are; this is what they do not bring.
RUN python3 -m pip install --no-cache-dir --no-deps -r requirements/gpu.txt
COPY pyproject.toml README.md LICENSE ./
COPY api_schemas api_schemas
COPY app app
COPY nnsight_engine nnsight_engine
# The last command imports the server, so a base that lacks something fails here and not where it runs.
RUN python3 -m pip install --no-cache-dir --no-deps . && NNSIGHT_ENGINE_DATA_DIR=/tmp/new nnsight-engine keys list \
    && rm -rf /tmp/new
ENV PYTHONUNBUFFERED=1 \
    USER=engine \
    HOME=/data \
    XDG_CACHE_HOME=/data/cache \
    TORCHINDUCTOR_CACHE_DIR=/data/cache/torchinductor \
    TRITON_CACHE_DIR=/data/cache/triton \
    HF_HOME=/data/models \
    NNSIGHT_ENGINE_HOST=0.0.0.0 \
    NNSIGHT_ENGINE_LOG_FORMAT=json \
    NNSIGHT_ENGINE_DATA_DIR=/data/server \
    NNSIGHT_ENGINE_RESULT_DIR=/data/results
VOLUME /data
USER 10001:10001
WORKDIR /data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=90s --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:%s/health/live' % os.environ.get('NNSIGHT_ENGINE_PORT', 8000), timeout=2)"]
ENTRYPOINT ["tini", "--", "nnsight-engine"]
CMD ["serve", "Qwen/Qwen3-0.6B"]
