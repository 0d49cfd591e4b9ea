"""What trains the same model where: gpudist_core beside plain Keras 3, on each topology, judged by `gpudist verify`."""
