# gpudist for macOS, and for other systems that can run Linux containers:
#   docker build -t gpudist https://github.com/gpudist/gpudist.git
#   docker run --rm gpudist demo
#   docker run --rm -v "$PWD:/work" gpudist verify train.py --topology 1x4 --topology 2x2
# What your program needs besides TensorFlow goes into an image of your own:
#   FROM gpudist
#   RUN pip install --no-cache-dir pandas==2.3.3
FROM python:3.12-slim AS build
WORKDIR /source
COPY . .
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:3.12-slim
RUN --mount=type=bind,from=build,source=/wheel,target=/wheel \
    python -m pip install --no-cache-dir --compile "$(echo /wheel/*.whl)[tensorflow,html]"
# Not root, and a home folder that any --user can write: Keras keeps its settings there.
RUN useradd --create-home --uid 1000 gpudist && chmod 777 /home/gpudist
ENV HOME=/home/gpudist
USER 1000
WORKDIR /work
ENTRYPOINT ["gpudist"]
CMD ["--help"]
