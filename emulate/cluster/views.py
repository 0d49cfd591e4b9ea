"""Give a program copy-on-write views: it sees the user's folder and may change it, and the user's files stay unchanged."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from emulate.cluster import system
from emulate.errors import Unavailable
from emulate.told import Told, told

COPY_LIMIT = 1 << 30
"""Largest size of a working copy, in bytes."""
_NO_VIEW = told("root-without-view")("What the program writes directly under / is kept: the root folder gets no view.")
_COPIED = told("working-copy")("Each run works on a copy of {}: a view of it is refused ({}).")
_MOST_NEIGHBOURS = 4096
_LINKED = (".git", ".hg", ".svn", "node_modules")


class Views:
    """Hold the views of one cluster.

    Args:
        directory: The run's folder. It stays real, and what the views need lies in it.
        in_user_namespace: Whether the mounts are made by somebody who is not root.
    """

    def __init__(self, directory: Path | None = None, *, in_user_namespace: bool = False) -> None:
        self._directory = None if directory is None else Path(os.path.realpath(directory))
        self._in_user_namespace = in_user_namespace
        # Working copies lie there by their whole paths, with links to what is beside them.
        self.copies_root = f"{self._directory}/views/copy"
        self._mounted: list[Path] = []
        self.copies: list[tuple[Path, Path]] = []

    def __str__(self) -> str:
        kinds = [name for name, some in (("copy-on-write view", self._mounted), ("working copy", self.copies)) if some]
        return " and ".join(kinds) or "no view"

    def show(self, folders: Iterable[Path], refusal: str) -> list[Told]:
        """Give the folders a view each, nested ones their outermost alone; what the user should know of it.

        Args:
            folders: Existing folders.
            refusal: Why overlay mounts cannot be had, empty where they can.

        Returns:
            Notes.
        """
        notes = []
        for number, folder in enumerate(outermost(folders)):
            if folder == Path("/"):
                notes.append(_NO_VIEW)
            elif refused := refusal or self._try_overlay(folder, number):
                self.copies.append((folder, self._copy(folder)))
                notes.append(_COPIED.format(folder, refused))
        for folder, copy in self.copies:
            self._link_neighbours(folder, copy)
        return notes

    def path(self, path: Path) -> Path:
        """Return the place of a user's file for the hosts."""
        absolute = Path(os.path.realpath(path))
        for original, copy in self.copies:
            if absolute.is_relative_to(original):
                return copy / absolute.relative_to(original)
        return path

    def is_private(self, path: str) -> bool:
        """Return whether only this cluster's hosts see what is written at this absolute path."""
        places = [*self._mounted, *([] if self._directory is None else [self._directory])]
        return any(path == str(place) or path.startswith(f"{place}{os.sep}") for place in places)

    def _try_overlay(self, folder: Path, number: int) -> str:
        try:
            self._overlay(folder, number)
        except OSError as error:
            return error.strerror or str(error)
        self._mounted.append(folder)
        return ""

    def _overlay(self, folder: Path, number: int) -> None:
        assert self._directory is not None
        with contextlib.ExitStack() as handles:
            covered = [self._directory] if self._directory.is_relative_to(folder) else []
            again = [(path, handles.enter_context(_handle(path))) for path in (*mounts_below(folder), *covered)]
            lower = handles.enter_context(_handle(folder))
            self._mount_on_disk_or_in_memory(folder, lower, self._directory / "views" / str(number), bool(covered))
            for path, fd in again:
                system.mount(f"/proc/self/fd/{fd}", str(path), None, system.MS_BIND | system.MS_REC)

    def _mount_on_disk_or_in_memory(self, folder: Path, lower: int, place: Path, is_covered: bool) -> None:
        place.mkdir(parents=True)
        if not is_covered:  # what is written may not lie in what is viewed
            with contextlib.suppress(OSError):
                self._mount(folder, lower, place)
                return
        system.mount("tmpfs", str(place), "tmpfs")
        self._mount(folder, lower, place)

    def _mount(self, folder: Path, lower: int, place: Path) -> None:
        for name in ("upper", "work"):
            (place / name).mkdir(exist_ok=True)
        shutil.copystat(folder, place / "upper")  # the view's top has the mode that the folder has
        with _handle(place / "upper") as upper, _handle(place / "work") as work:
            # By descriptor: a path may contain the commas and colons that separate options.
            options = [f"{name}dir=/proc/self/fd/{fd}" for name, fd in (("lower", lower), ("upper", upper), ("work", work))]
            # Without redirects a folder that was there before cannot be renamed (EXDEV); only root may have them.
            options.append("userxattr" if self._in_user_namespace else "redirect_dir=on")
            system.mount("overlay", str(folder), "overlay", 0, ",".join(options))

    def _copy(self, folder: Path) -> Path:
        assert self._directory is not None
        place = Path(f"{self.copies_root}{folder}")
        if _size(folder, self._directory) > COPY_LIMIT:
            raise Unavailable(
                "A folder in which a program writes must be viewed by an overlay mount, which this system refuses, or be "
                f"small enough to be copied for each run ({COPY_LIMIT >> 20} MiB). Received: folder={str(folder)!r}, which is "
                "larger. Start from an empty working directory, or keep data sets outside of it."
            )
        _copy_tree(folder, place, self._directory)
        return place

    def _link_neighbours(self, folder: Path, copy: Path) -> None:
        """Link what is beside and above the folder, so that the copy finds it too: `../data`, `parents[1] / "data"`."""
        assert self._directory is not None
        for above, mirrored in zip(folder.parents, copy.parents, strict=False):
            with contextlib.suppress(PermissionError), os.scandir(above) as entries:
                for entry in itertools.islice(entries, _MOST_NEIGHBOURS):
                    if not self._directory.is_relative_to(entry.path):
                        with contextlib.suppress(FileExistsError):
                            (mirrored / entry.name).symlink_to(entry.path)

    def remove(self) -> None:
        """Take the mounts away and delete what was written into the views."""
        for folder in reversed(self._mounted):
            with contextlib.suppress(OSError):
                system.unmount(folder)
        if self._directory is not None and (self._directory / "views").exists():
            for place in (self._directory / "views").iterdir():
                with contextlib.suppress(OSError):
                    system.unmount(place)
            remove_tree(self._directory / "views")


def outermost(folders: Iterable[Path]) -> list[Path]:
    """Return the folders without symbolic links, and without those inside another one."""
    real = sorted({Path(os.path.realpath(folder)) for folder in folders})
    return [folder for folder in real if not any(folder != other and folder.is_relative_to(other) for other in real)]


def remove_tree(tree: Path) -> None:
    """Delete a folder whatever the modes in it (an overlay's work folder has none)."""
    shutil.rmtree(tree, ignore_errors=True)
    if not tree.exists():
        return
    for parent, folders, _ in os.walk(tree):  # from the top, so that each folder is opened before it is read
        for name in folders:
            path = Path(parent, name)
            if not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.chmod(stat.S_IRWXU)
    shutil.rmtree(tree, ignore_errors=True)


@contextlib.contextmanager
def _handle(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def mounts_below(folder: Path) -> list[Path]:
    """Return the mount points of other file systems inside a folder: an overlay would show them empty."""
    mount_points = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        # The kernel writes spaces, tabs, newlines and backslashes of a path as octal escapes (proc(5)).
        name = re.sub(rb"\\(\d{3})", lambda escape: bytes([int(escape[1], 8)]), line.split()[4])
        path = Path(os.fsdecode(name))
        if path != folder and path.is_relative_to(folder) and path.is_dir():
            mount_points.append(path)
    return outermost(mount_points)


def _size(folder: Path, without: Path) -> int:
    total = 0
    for entry in _entries(folder, without):
        with contextlib.suppress(FileNotFoundError):  # gone meanwhile
            if entry.is_dir(follow_symlinks=False):
                total += _size(Path(entry.path), without)
            elif not entry.is_symlink():
                total += entry.stat(follow_symlinks=False).st_size
        if total > COPY_LIMIT:
            break
    return total


def _entries(folder: Path, without: Path) -> Iterator[os.DirEntry[str]]:
    """Yield what must be copied of a folder: not the run's own folder, and nothing that a program never writes."""
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if not _is_of_runs(Path(entry.path), without) and not _is_linked(entry))


def _is_of_runs(path: Path, own: Path) -> bool:
    """Return whether a folder belongs to the run, or to another run beside it, which writes and removes files there."""
    return path == own or (path.parent == own.parent and (path / "host-0").exists())


def _is_linked(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir() and (entry.name in _LINKED or os.path.exists(os.path.join(entry.path, "pyvenv.cfg")))


def _copy_tree(folder: Path, target: Path, without: Path) -> None:
    target.mkdir(parents=True)
    with os.scandir(folder) as entries:
        for entry in entries:
            new = target / entry.name
            if _is_of_runs(Path(entry.path), without):
                continue
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                if _is_linked(entry):
                    new.symlink_to(entry.path)
                elif entry.is_dir(follow_symlinks=False):
                    _copy_tree(Path(entry.path), new, without)
                elif entry.is_symlink() or entry.is_file():
                    try:
                        shutil.copy2(entry.path, new, follow_symlinks=False)
                    except OSError as error:
                        if error.errno != errno.EACCES:  # what the program could not read either is not there
                            raise
    shutil.copystat(folder, target)
