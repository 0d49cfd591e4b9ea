"""Certificates: write down the first training steps of a verified run, and compare those of a real run with them.

What is here imports no TensorFlow: a verification writes certificates in a process that has none. `checks` compares.
"""

from gpudist_core.certificates.certificate import (
    MOST,
    NUM,
    START,
    STEPS,
    Certificate,
    CertificateMismatch,
    Input,
    Integers,
    Tensor,
    examples_of,
    project,
)

__all__ = [
    "MOST",
    "NUM",
    "START",
    "STEPS",
    "Certificate",
    "CertificateMismatch",
    "Input",
    "Integers",
    "Tensor",
    "examples_of",
    "project",
]
