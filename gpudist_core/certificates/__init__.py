"""Certificates: write down the first training steps of a verified run, and compare those of a real run with them."""

from gpudist_core.certificates.certificate import STEPS, Certificate, CertificateMismatch, Input, Tensor
from gpudist_core.certificates.check import Check, check
from gpudist_core.certificates.fingerprints import NUM, examples_of, project

__all__ = ["NUM", "STEPS", "Certificate", "CertificateMismatch", "Check", "Input", "Tensor", "check", "examples_of", "project"]
