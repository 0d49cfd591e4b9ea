"""Find a machine: in the catalogue of gpudist by its name, or in the user's own file."""

from __future__ import annotations

import csv
import difflib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from emulate.errors import UsageError
from emulate.plan.collectives import BandwidthTable, Between, Inside, Ring, parse_between, parse_inside

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_CATALOGUE = Path(__file__).with_name("machines.toml")
_TABLES = Path(__file__).with_name("all_reduce.csv")
_REQUIRED = ("gpu", "gpus_per_host")
_FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "gpu": ("a text", lambda value: isinstance(value, str)),
    "gpus_per_host": ("a whole number >= 1", lambda value: type(value) is int and value >= 1),
    "link_inside": ("a text", lambda value: isinstance(value, str)),
    "link_between": ("a text", lambda value: isinstance(value, str)),
    "dollars_per_hour": ("a number >= 0", lambda value: type(value) in (int, float) and value >= 0),
    "price_year": ("a year", lambda value: type(value) is int),
    "all_reduce_tables": ("a list of texts", lambda value: isinstance(value, list)),
    "memory_gb": ("a number > 0", lambda value: _is_positive(value)),
    "tflops": (
        "a table of numbers > 0 by dtype",
        lambda value: isinstance(value, dict) and all(map(_is_positive, value.values())),
    ),
    "source": ("a text", lambda value: isinstance(value, str)),
}
"""By key of a machine the form of its value, in words and as a check."""


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


@dataclass(frozen=True)
class Machine:
    """Describe a machine: a host with GPUs, of which any number is connected by a network.

    Attributes:
        name: The name in the catalogue, or that of the file.
        gpu: The name of the GPU.
        gpus_per_host: The number of GPUs in one host.
        inside: The links inside a host; None where a host has one GPU.
        between: The network between hosts; None where there is none.
        tables: Measured all-reduces, which are preferred to a formula.
        tflops: Peak of one GPU in 10^12 operations a second, by dtype.
        memory_gb: The memory of one GPU in 10^9 bytes; None where it is unknown.
        dollars_per_hour: The price of one host; None where it is unknown.
        price_year: The year in which that price was published.
        source: Where the description comes from.
    """

    name: str
    gpu: str
    gpus_per_host: int
    inside: Inside | None
    between: Between | None
    tables: tuple[BandwidthTable, ...] = ()
    tflops: tuple[tuple[str, float], ...] = ()
    memory_gb: float | None = None
    dollars_per_hour: float | None = None
    price_year: int | None = None
    source: str = ""

    def hosts(self, num_gpus: int) -> int:
        """Return how many hosts so many GPUs take."""
        return -(-num_gpus // self.gpus_per_host)

    def ring(self, num_gpus: int) -> Ring:
        """Return the way of an all-reduce between so many GPUs.

        Args:
            num_gpus: At least two.

        Returns:
            The links that it uses.

        Raises:
            UsageError: If they do not fit into one host and there is no network.
        """
        hosts = self.hosts(num_gpus)
        if hosts > 1 and self.between is None:
            raise UsageError(
                f"Several hosts need a network. Received: machine={self.name!r}, gpus={num_gpus}, gpus_per_host="
                f"{self.gpus_per_host}, without link_between. Give link_between in a file of your own."
            )
        return Ring(num_gpus, hosts, self.inside, self.between, self.tables)


def find_machine(text: str) -> Machine:
    """Find a machine of the catalogue, or read the user's own file.

    Args:
        text: A name such as `dgx-a100`, or a path that ends with `.toml`.

    Returns:
        The machine.

    Raises:
        UsageError: If there is no such machine or file, or the file describes none.
    """
    catalogue, known = _read(_CATALOGUE), ", ".join(machine_names())
    if text.endswith(".toml"):
        path = Path(text)
        if not path.is_file():
            raise UsageError(f"--on must name a machine or an existing file. Received: --on {text!r}. Machines: {known}.")
        return machine_of(path.stem, _read(path), catalogue["gpu"])
    names = {name.lower(): name for name in catalogue["machine"]}
    if text.lower() not in names:
        close = difflib.get_close_matches(text.lower(), names, n=1)
        hint = f"Did you mean {names[close[0]]!r}? " if close else ""
        raise UsageError(
            f"--on must name a machine that gpudist knows, or a TOML file that describes one. Received: --on {text!r}. "
            f"{hint}Machines: {known}."
        )
    name = names[text.lower()]
    return machine_of(name, catalogue["machine"][name], catalogue["gpu"])


def machine_of(name: str, entry: Mapping[str, Any], gpus: Mapping[str, Any] | None = None) -> Machine:
    """Read one machine.

    Args:
        name: Its name, for messages.
        entry: `gpu`, `gpus_per_host`, and what else the catalogue has.
        gpus: The catalogue's GPUs. Default: those of gpudist.

    Returns:
        The machine.

    Raises:
        UsageError: If a key is missing, unknown, or has a value that cannot be meant.
    """
    _check_keys(name, entry)
    gpu, count = entry["gpu"], entry["gpus_per_host"]
    inside = parse_inside(entry["link_inside"], gpu, count) if entry.get("link_inside") else None
    if count > 1 and inside is None:
        raise UsageError(
            f"link_inside must be given for a host with several GPUs. Received: machine={name!r}, gpus_per_host={count}. "
            "Examples: 'NVSwitch, NVLink 3', 'PCIe 4.0 x16, no P2P'."
        )
    known_gpus = _read(_CATALOGUE)["gpu"] if gpus is None else gpus
    fitting = sorted((other for other in known_gpus if other.lower() in gpu.lower()), key=len)
    of_gpu = {**(known_gpus[fitting[-1]] if fitting else {}), **entry}
    return Machine(
        name=name,
        gpu=gpu,
        gpus_per_host=count,
        inside=inside,
        between=parse_between(entry["link_between"]) if entry.get("link_between") else None,
        tables=tuple(_table(table) for table in entry.get("all_reduce_tables", ())),
        tflops=tuple(of_gpu.get("tflops", {}).items()),
        memory_gb=of_gpu.get("memory_gb"),
        dollars_per_hour=entry.get("dollars_per_hour"),
        price_year=entry.get("price_year"),
        source=str(entry.get("source", "")),
    )


def _check_keys(name: str, entry: Mapping[str, Any]) -> None:
    if unknown := [key for key in entry if key not in _FORMS]:
        raise UsageError(
            f"A machine's keys must be known. Received: machine={name!r}, key={unknown[0]!r}. "
            f"Possible keys: {', '.join(_FORMS)}."
        )
    if missing := [key for key in _REQUIRED if key not in entry]:
        raise UsageError(f"A machine needs {' and '.join(_REQUIRED)}. Received: machine={name!r} without {', '.join(missing)}.")
    for key, value in entry.items():
        form, is_right = _FORMS[key]
        if not is_right(value):
            raise UsageError(f"{key} must be {form}. Received: machine={name!r}, {key}={value!r}.")


def machine_names() -> list[str]:
    """Return the names of the catalogue."""
    return list(_read(_CATALOGUE)["machine"])


@cache
def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"A machine's file must be valid TOML. Received: {str(path)!r} ({error}).") from None


@cache
def _measured() -> dict[str, BandwidthTable]:
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with _TABLES.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            place = points.setdefault((row["machine"], int(row["num_gpus"])), [])
            place.append((float(row["message_bytes"]), float(row["bus_bandwidth_gb_per_s"])))
    return {name: BandwidthTable(count, tuple(sorted(some))) for (name, count), some in points.items()}


def _table(name: str) -> BandwidthTable:
    if name not in _measured():
        raise UsageError(
            f"all_reduce_tables must name tables of gpudist. Received: all_reduce_tables={name!r}. Tables: "
            f"{', '.join(repr(table) for table in _measured())}."
        )
    return _measured()[name]
