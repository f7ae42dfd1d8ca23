# Stretto with what training needs.
#
#   docker build -t stretto:cpu .
#   docker build -t stretto:cuda --build-arg BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime .
#
# BASE has Python 3.11 or newer with pip. If it has a torch of the supported versions, that one stays; otherwise
# pip installs its default build, and PIP_OPTIONS (such as --index-url) chooses another.
ARG BASE=python:3.12-slim
FROM ${BASE}

# torch.compile and Triton call a C++ compiler
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace
COPY pyproject.toml README.md LICENSE ./
COPY src src
# recommender, hf, all, or others of README
ARG EXTRAS=train,fast,tensorboard
ARG PIP_OPTIONS=""
ENV PIP_BREAK_SYSTEM_PACKAGES=1
# hadolint ignore=DL3013,SC2086
RUN pip install --no-cache-dir ${PIP_OPTIONS} ".[${EXTRAS}]" \
    && ln -s src/stretto/configs configs

CMD ["stretto", "--help"]
