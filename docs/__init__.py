"""The documentation, and the Python that writes and checks parts of it."""
