"""Programs, each with a training loop, a loss and a model of a package from PyPI, on small synthetic data."""
