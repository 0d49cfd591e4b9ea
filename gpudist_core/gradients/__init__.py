"""Gradients of all replicas: summed in one collective, then clipped."""
