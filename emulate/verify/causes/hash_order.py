"""Data that hang on how Python hashes strings, which every host does in its own way."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes import real_hosts
from emulate.verify.causes.cause import Cause, Sign

_WORDS = real_hosts.Words(
    code="hash-order",
    hangs="depends on how Python hashes strings, and every host does so in its own way",
    each="each host hashes strings in its own way, as real hosts do",
    alike="the same hashes on all hosts",
    as_real="hosts that hash as real ones do",
    order="The order of a set of strings, or a hash, decides in which order a host takes its rows: every row stays with its "
    "host, so none is lost or seen too often.",
    unseen="data: on hosts that hash strings in their own ways, as real ones do, those after the first have other rows: in "
    "another order, so that other ones are seen in these steps, or with other contents. --steps all tells which; sorted(...) "
    "of a set, or PYTHONHASHSEED=0 on every host, makes it sure; --allow hash-order takes it as it is.",
)


def _search(case: Case) -> Sign | None:
    return real_hosts.search(case, case.with_own_hashes, case.hash_places, _WORDS)


HASH_ORDER = Cause(
    code="hash-order",
    title="each host orders a set of strings in its own way",
    meaning="Python hashes strings with a seed that each process draws for itself, so the order of a set of strings, and "
    "hash() of one, are others on every host: words and classes are numbered differently, files are dealt out twice or to "
    "nobody, without an error.",
    evidence="Where the program's own files make sets or ask for hashes, it is run once more on hosts whose Python hashes "
    "in their own ways (the first as before): rows of the others are taken from another host's share or have other contents, "
    "or gradients, weights or reports differ.",
    fix="Sort before you number or deal out: sorted(set(words)); for a number that belongs to a string take zlib.crc32 or "
    "hashlib, not hash(). Or set PYTHONHASHSEED=0 in the environment of every host, which gpudist then takes as it is.",
    search=_search,
)
