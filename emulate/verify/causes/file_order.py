"""Data that hang on the order in which a folder is listed, which is another one on each disk."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes import real_hosts
from emulate.verify.causes.cause import Cause, Sign

_WORDS = real_hosts.Words(
    code="file-order",
    hangs="depends on the order in which a folder is listed, and every disk has one of its own",
    each="each host lists folders in an order of its own, as hosts with disks of their own do",
    alike="the same order on all hosts",
    as_real="folders that the hosts after the first list in another order",
    order="The order in which a folder is listed decides in which order a host takes its rows: every row stays with its host, "
    "so none is lost or seen too often.",
    unseen="data: where hosts list folders in orders of their own, those after the first have other rows: in another order, so "
    "that other ones are seen in these steps, or with other contents. --steps all tells which; sorted(...) of what was listed "
    "makes it sure; --allow file-order takes it as it is.",
)


def _search(case: Case) -> Sign | None:
    return real_hosts.search(case, case.with_own_listing, case.listing_places, _WORDS)


FILE_ORDER = Cause(
    code="file-order",
    title="each host lists a folder in its own order",
    meaning="A file system lists the entries of a folder in an order of its own, so what os.listdir, glob, Path.iterdir and "
    "tf.io.gfile give comes in another order on each disk: files are dealt out twice or to nobody, classes are numbered "
    "differently, without an error. On one machine all hosts list alike, which hides it.",
    evidence="Where the program's own files list folders, it is run once more with the entries in another order on the hosts "
    "after the first: rows of theirs are taken from another host's share or have other contents, or gradients, weights or "
    "reports differ.",
    fix="Sort what was listed before you deal it out or number it: sorted(glob.glob(...)), sorted(os.listdir(...)), "
    "sorted(path.iterdir()).",
    search=_search,
)
