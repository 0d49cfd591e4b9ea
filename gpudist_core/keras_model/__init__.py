"""Keras's own compile, fit, evaluate and predict, with the result of one device on every topology."""

from gpudist_core.keras_model.make import distributed

__all__ = ["distributed"]
