"""Private names of TensorFlow and Keras that gpudist_core needs; `tests/core/upstream` tells when one is mended."""
