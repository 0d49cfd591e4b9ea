"""Detect data that depend on Python's string hashes, which differ between hosts."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes import real_hosts
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.lines import made

_WORDS = real_hosts.Words(
    code="hash-order",
    hangs="depends on how Python hashes strings, and each host hashes in its own way",
    each="each host hashes strings in its own way, as real hosts do",
    alike="the same hashes on all hosts",
    as_real="another hash seed on all hosts but the first, as real hosts have",
    order=(
        "The order of a set of strings, or a hash, decides in which order a host takes its examples. Every "
        "example stays on its host, so none is lost or repeated."
    ),
    unseen=(
        "data: with another hash seed on all hosts but the first, as real hosts have, these hosts have other "
        "examples. gpudist could not see whether they only come in another order or have other contents. Run "
        "with --steps all to find out. Use sorted(...) on the set, or PYTHONHASHSEED=0 on every host, to be "
        "sure, or --allow hash-order to accept it."
    ),
)


def _search(case: Case) -> Sign | None:
    return real_hosts.search(case, case.with_own_hashes, case.hash_places, _WORDS)


HASH_ORDER = Cause("hash-order", _search, blame=(made("examples"),))
