"""Detect data that depend on the listing order of a folder, which differs between disks."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes import real_hosts
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.lines import made

_WORDS = real_hosts.Words(
    code="file-order",
    hangs="depends on the order in which a folder is listed, and each disk has its own order",
    each="each host lists folders in its own order, as hosts with separate disks do",
    alike="the same order on all hosts",
    as_real="folders listed in another order on all hosts but the first",
    order=(
        "The order in which a folder is listed decides in which order a host takes its examples. Every example "
        "stays on its host, so none is lost or repeated."
    ),
    unseen=(
        "data: with folders listed in another order on all hosts but the first, these hosts have other examples. "
        "gpudist could not see whether they only come in another order or have other contents. Run with --steps "
        "all to find out. Use sorted(...) on the list to be sure, or --allow file-order to accept it."
    ),
)


def _search(case: Case) -> Sign | None:
    return real_hosts.search(case, case.with_own_listing, case.listing_places, _WORDS)


FILE_ORDER = Cause("file-order", _search, blame=(made("examples"),))
