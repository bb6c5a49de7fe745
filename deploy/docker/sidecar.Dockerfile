# The sidecar alone, without torch and without an engine: it reads what the ranks write to
# /dev/shm. Build from the repository's root:
#   docker build -f deploy/docker/sidecar.Dockerfile -t ultraep-serve:sidecar .
# Run it as the engine's user, with the engine's /dev/shm.
FROM python:3.11-slim-bookworm

WORKDIR /opt/ultraep-serve
COPY deploy/docker/sidecar-requirements.txt ./
RUN pip install --no-cache-dir --requirement sidecar-requirements.txt \
    && useradd --uid 10001 --create-home ultraep
COPY kernels kernels
COPY ultraep_serve ultraep_serve

USER 10001
ENV PYTHONPATH=/opt/ultraep-serve:/opt/ultraep-serve/kernels
EXPOSE 8700
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
    CMD ["python", "-S", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8700/healthz', timeout=4)"]
ENTRYPOINT ["python", "-m", "ultraep_serve.sidecar"]
CMD ["--help"]
