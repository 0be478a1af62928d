# optimize with the runtimes that a CPU runs:
#
#     docker build --tag optimize .
#     docker run --rm --volume "$PWD:/work" optimize net.pt --model nets:net --fuse --to onnx --out optimized
#
# Files that it writes belong to user 1000; to another with --user "$(id --user):$(id --group)".

ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim AS build
# pip's default index gives torch with gigabytes of CUDA on Linux; this one has the builds for CPUs.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# What pyproject.toml calls optional; constraints.txt holds the versions that the tests were last seen to pass with.
ARG EXTRAS=cpu,openvino
RUN python -m venv /opt/optimize
ENV PATH=/opt/optimize/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt /source/
RUN pip install --constraint /source/constraints.txt --index-url "$TORCH_INDEX" torch
COPY . /source
RUN pip install --constraint /source/constraints.txt "/source[$EXTRAS]"

FROM python:${PYTHON_VERSION}-slim
# libseccomp confines what opens untrusted files; g++ compiles for the targets pt2 and compile.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libseccomp2 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/optimize /opt/optimize
RUN useradd --uid 1000 --create-home optimize
# The names are for whoever is told by --user: torch asks for a home and a name, and such a user has neither.
ENV PATH=/opt/optimize/bin:$PATH HOME=/home/optimize USER=optimize PYTHONUNBUFFERED=1
RUN chmod 1777 /home/optimize
USER optimize
WORKDIR /work
ENTRYPOINT ["optimize"]
CMD ["--help"]
