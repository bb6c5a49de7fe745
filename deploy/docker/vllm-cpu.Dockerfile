# vLLM for CPU with balancing. Build from the repository's root:
#   docker build -f deploy/docker/vllm-cpu.Dockerfile -t ultraep-serve:vllm-cpu \
#     --build-arg PIP_EXTRA_INDEX_URL=... .
# with the CPU wheel index that pytorch.org names, unless pip finds torch for CPU without it.
FROM python:3.11-slim-bookworm

# g++: torch.compile writes C++. libnuma1: vLLM's kernels link it. tcmalloc: the launcher
# has vLLM allocate by it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 libtcmalloc-minimal4 \
    && rm -rf /var/lib/apt/lists/*

ARG PIP_EXTRA_INDEX_URL=""
WORKDIR /opt/ultraep-serve
COPY pyproject.toml README.md LICENSE ./
COPY deploy/environment.py deploy/setup_vllm_cpu.py deploy/
COPY kernels kernels
COPY ultraep_serve ultraep_serve
COPY benchmarks/ultraep_lab benchmarks/ultraep_lab
RUN PIP_NO_CACHE_DIR=1 python deploy/setup_vllm_cpu.py /opt/venv --no-dev \
    && useradd --uid 10001 --create-home ultraep \
    && install --directory --owner=ultraep /home/ultraep/.cache

USER 10001
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /home/ultraep
EXPOSE 8000 8700
HEALTHCHECK --interval=10s --timeout=30s --start-period=30m --retries=6 \
    CMD ["python", "-S", "-c", "from urllib.request import urlopen; [urlopen(f'http://127.0.0.1:{end}', timeout=10) for end in ('8000/health', '8700/readyz')]"]
ENTRYPOINT ["ultraep-serve"]
CMD ["vllm", "--help"]
