# specdec in an image of AMD's that brings torch for ROCm, its Triton, and AITER where it has been
# built. Nobody has built this recipe or run it on a card yet; docs/rocm.md says what was run.
#
#   docker build -f docs/rocm.Dockerfile --build-arg BASE=IMAGE -t specdec .
#   docker run --rm -it --device /dev/kfd --device /dev/dri --group-add video --ipc host \
#       -v specdec-cache:/cache specdec doctor
#
# BASE has a ROCm build of torch 2.11 or newer, in the Python that PYTHON names.

ARG BASE
FROM ${BASE}
ARG PYTHON=python3

# Tools that set-up and the compiler of Triton ask for.
RUN apt-get update && apt-get install -y --no-install-recommends make gcc g++ python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /specdec
COPY pyproject.toml constraints.txt Makefile README.md LICENSE ./
COPY specdec specdec
COPY drafters drafters
COPY verifiers verifiers
COPY evals evals
COPY tests tests

# No GPU is here while an image is built, so nothing is asked of one: the image's torch is kept.
RUN make .venv/.package PYTHON="$(command -v ${PYTHON})"

# Verdicts of self-checks and kernels that Triton compiles stay, if /cache is a volume. What AITER
# builds is lost with the container: its own variable for that would hide what the image has built.
ENV SPECDEC_CACHE=/cache/specdec TRITON_CACHE_DIR=/cache/triton
ENTRYPOINT ["/specdec/.venv/bin/specdec"]
CMD ["doctor"]
