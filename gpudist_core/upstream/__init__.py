"""Private names of TensorFlow and Keras that gpudist_core needs, each in one place; `tests/core/upstream` says when one is mended."""
