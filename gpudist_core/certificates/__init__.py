"""Certificates: write down the first training steps of a verified run, and compare those of a real run with them."""

from gpudist_core.certificates.certificate import MOST, STEPS, Certificate, CertificateMismatch, Input, Tensor
from gpudist_core.certificates.checks import Check, check
from gpudist_core.certificates.fingerprints import NUM, START, Integers, examples_of, project

__all__ = [
    "MOST",
    "NUM",
    "START",
    "STEPS",
    "Certificate",
    "CertificateMismatch",
    "Check",
    "Input",
    "Integers",
    "Tensor",
    "check",
    "examples_of",
    "project",
]
