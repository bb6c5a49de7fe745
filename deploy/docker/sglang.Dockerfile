# SGLang on NVIDIA GPUs with balancing; not built on this base yet. Build from the repository's root:
#   docker build -f deploy/docker/sglang.Dockerfile -t ultraep-serve:sglang .
FROM lmsysorg/sglang:v0.5.23

WORKDIR /opt/ultraep-serve
COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY ultraep_serve ultraep_serve
COPY benchmarks/ultraep_lab benchmarks/ultraep_lab
# The engine and torch are those of the image: the extra asks for the release that is there.
# hadolint ignore=DL3013
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir ".[sglang,cuda]" \
    && useradd --uid 10001 --create-home ultraep

USER 10001
WORKDIR /home/ultraep
# /health would send a prompt of its own, and fail while a long prefill keeps it waiting.
ENV SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0
EXPOSE 30000 30700
HEALTHCHECK --interval=10s --timeout=30s --start-period=60m --retries=6 \
    CMD ["python3", "-S", "-c", "from urllib.request import urlopen; [urlopen(f'http://127.0.0.1:{end}', timeout=10) for end in ('30000/health', '30700/readyz')]"]
ENTRYPOINT ["ultraep-serve"]
CMD ["sglang", "--help"]
