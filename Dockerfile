# syntax=docker/dockerfile:1
# NNsight Engine in a container.
#
#   docker build --target cpu -t nnsight-engine:cpu .
#   docker build --target gpu -t nnsight-engine:gpu .
#   docker run --rm -v nnsight:/data nnsight-engine:cpu keys create --tenant me --scopes completions,interventions
#   docker run --rm -p 8000:8000 -v nnsight:/data nnsight-engine:cpu
#   docker run --rm -p 8000:8000 -v nnsight:/data --gpus all --ipc=host nnsight-engine:gpu serve Qwen/Qwen3-0.6B --host 0.0.0.0
#
# Pin the bases for a reproducible build: --build-arg PYTHON_IMAGE=python:3.11-slim@sha256:…
ARG PYTHON_IMAGE=python:3.11-slim
ARG GPU_IMAGE=vllm/vllm-openai:v0.32.0

# ---- cpu-build: compilers, the locked packages, the converted model ---------------------------------------------------
FROM ${PYTHON_IMAGE} AS cpu-build
# The compiler stays here: wheels bring everything that runs.
RUN apt-get update && apt-get install --yes --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/nnsight-engine
RUN python -m venv .venv
COPY requirements requirements
COPY scripts scripts
COPY pyproject.toml README.md LICENSE ./
# The packages come before our sources, so that a change of ours does not install 3 GB again.
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=cache,target=/root/.cache/uv \
    scripts/install.sh .venv --packages-only requirements/cpu.txt
COPY api_schemas api_schemas
COPY app app
COPY nnsight_engine nnsight_engine
RUN scripts/install.sh .venv --project-only
RUN XDG_CACHE_HOME=/opt/nnsight-engine/cache .venv/bin/python -m nnsight_engine.modeling.bundled

# ---- cpu: the server with the bundled model ---------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS cpu
# vLLM on CPU compiles kernels with g++ when asked for --compile, and reads the core layout through libnuma.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home engine && install --directory --owner=engine --mode=700 /data
COPY --from=cpu-build --chown=engine:engine /opt/nnsight-engine /opt/nnsight-engine
ENV PATH=/opt/nnsight-engine/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/opt/nnsight-engine/cache \
    VLLM_CPU_KVCACHE_SPACE=1 \
    VLLM_CPU_NUM_OF_RESERVED_CPU=0 \
    NNSIGHT_ENGINE_DATA_DIR=/data
VOLUME /data
USER engine
WORKDIR /home/engine
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=90s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/live', timeout=2)"]
ENTRYPOINT ["nnsight-engine"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]

# ---- gpu: our packages on vLLM's own image ----------------------------------------------------------------------------
FROM ${GPU_IMAGE} AS gpu
WORKDIR /opt/nnsight-engine
COPY pyproject.toml README.md LICENSE ./
COPY api_schemas api_schemas
COPY app app
COPY nnsight_engine nnsight_engine
# vLLM, torch and the web stack are in the base and stay as they are; only what it may lack is added.
RUN python3 -m pip install --no-cache-dir "alembic>=1.14" "argon2-cffi>=23.1" "cloudpickle>=3.1" "filelock>=3.16" "gguf>=0.17" \
        "greenlet>=3.1" "msgspec>=0.19" "pg8000>=1.31" "platformdirs>=4.3" "pydantic-settings>=2.7" "rich>=13.9" "sqlalchemy>=2.0" \
        "sse-starlette>=3.0" "typer>=0.15" "websockets>=15.0" "zstandard>=0.23" \
    && python3 -m pip install --no-cache-dir --no-deps . \
    && useradd --uid 10001 --create-home engine && install --directory --owner=engine --mode=700 /data
ENV PYTHONUNBUFFERED=1 \
    NNSIGHT_ENGINE_DATA_DIR=/data
VOLUME /data
USER engine
WORKDIR /home/engine
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=600s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/live', timeout=2)"]
ENTRYPOINT ["nnsight-engine"]
CMD ["serve", "Qwen/Qwen3-0.6B", "--host", "0.0.0.0", "--port", "8000"]
