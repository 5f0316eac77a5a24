# bmburst with FlashAttention-4, and BMTrain built for these GPUs. docs/install.md says how it is built and run.
FROM nvidia/cuda:13.0.0-devel-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# What `bmburst build-bmtrain` asks for beside nvcc, which the base image has. Versions are Ubuntu's.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends cmake g++ make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/bmburst
ENV PATH=/opt/bmburst/bin:$PATH PIP_NO_CACHE_DIR=1

WORKDIR /opt/source
COPY constraints.txt ./
RUN pip install --constraint constraints.txt "torch>=2.11" "numpy>=1.26" setuptools pybind11

COPY LICENSE README.md pyproject.toml setup.py ./
COPY bmburst bmburst
COPY bmburst_ops bmburst_ops
COPY model_center_ext model_center_ext
RUN pip install --constraint constraints.txt --no-build-isolation ".[gpu]"

# Compute capabilities: A100, H100 and H200, B200. For one alone: docker build --build-arg ARCHITECTURES=90
ARG ARCHITECTURES="80 90 100"
# The list is several words.
# hadolint ignore=SC2086
RUN bmburst build-bmtrain --install --arch $ARCHITECTURES --portable --output /opt/wheels

# The user "ubuntu" of the base image.
USER 1000:1000
WORKDIR /home/ubuntu
# The image is good only if training can run in it: while it is built, on the CPU.
RUN bmburst doctor
CMD ["bmburst", "doctor"]
