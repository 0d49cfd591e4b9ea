"""Collect the private names of TensorFlow and Keras that gpudist_core needs. `tests/core/upstream` tests each of them."""
