# Flyweight in a container, for a CPU or for an NVIDIA GPU (the host brings the driver, torch's wheels the rest):
#   docker build --target cpu  -t flyweight:cpu --build-arg TORCH_INDEX=... .
#   docker build --target cuda -t flyweight:cuda .
#   docker run -p 8000:8000 -v flyweight:/models flyweight:cpu                  # serves the default model
#   docker run --gpus all -p 8000:8000 -v flyweight:/models flyweight:cuda serve Qwen/Qwen3-8B --host 0.0.0.0
FROM python:3.11-slim-bookworm AS source
WORKDIR /app
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
# Models are kept outside of the image; nothing runs as root.
RUN useradd --uid 1000 --create-home flyweight && mkdir /models && chown 1000 /models
ENV PIP_NO_CACHE_DIR=1 FLYWEIGHT_CACHE=/models HF_HOME=/models/hub

FROM source AS cpu
# PyTorch's index of CPU-only wheels (its install page names it); without it pip brings gigabytes of CUDA packages.
ARG TORCH_INDEX=
RUN pip install --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && pip install --constraint constraints.txt ".[all]"
USER 1000
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready')"]
ENTRYPOINT ["flyweight"]
CMD ["serve", "smollm2-135m", "--host", "0.0.0.0"]

FROM source AS cuda
RUN pip install --constraint constraints.txt torch \
    && pip install --constraint constraints.txt ".[all]"
USER 1000
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=300s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready')"]
ENTRYPOINT ["flyweight"]
CMD ["serve", "smollm2-135m", "--host", "0.0.0.0"]
