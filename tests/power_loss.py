"""A disk that loses its power: records what a piece of code does to a folder, and what may be left of it at any cut.

Recording. The calls that order changes of a disk (rename, unlink, mkdir, fsync, ...) are replaced for a while. Before
each of them the folder is scanned, and every difference from the last scan is logged as a write or a new file. So a
write cannot escape, whoever makes it: Python, a C extension or safetensors' Rust, which renames as well. A name that
moves or vanishes without such a call is an error.

The disk is as bad as POSIX allows, which is worse than any journalling file system:
- the content of a file is durable after an fsync of the file, and a name in a folder after an fsync of that folder;
  an fsync of a file does not keep its name, and an fsync of a folder does not keep the folder's own name;
- everything else before the cut is independently there or not, in any order; a write may also be torn at any byte, or
  be zeros of the right length, and one that is not an append may leave an empty file;
- a rename is one change, of which both names are there or neither; it is durable by an fsync of the target's folder.
Removing a folder's name hides what is in it. What was there before the recording is durable.
"""

import contextlib
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import pytest

Node = int  # a file or a folder by itself, whatever its name is
Tree = dict[str, "bytes | None"]  # relative path: content, or None for a folder
ROOT: Node = 0
_FRESH = 50_000_000  # ns: a file that changed so lately may change again and keep its time


@dataclass(frozen=True)
class Make:
    """A new file or folder gets its name."""

    folder: Node
    name: str
    node: Node
    is_folder: bool


@dataclass(frozen=True)
class Write:
    """`data` at `offset`, after which the file has `size` bytes."""

    node: Node
    offset: int
    data: bytes
    size: int
    appends: bool


@dataclass(frozen=True)
class Rename:
    node: Node
    folder: Node
    name: str
    target_folder: Node
    target_name: str


@dataclass(frozen=True)
class Remove:
    folder: Node
    name: str
    node: Node


@dataclass(frozen=True)
class Sync:
    node: Node


@dataclass(frozen=True)
class Promise:
    """What the code told its caller at this place, and what must hold from here on."""

    what: Any


Operation = Make | Write | Rename | Remove | Sync | Promise


@final
@dataclass
class Recording:
    """Everything that happened in a folder, in order. The first `start` operations describe what was there before."""

    root: Path
    log: list[Operation] = field(default_factory=list)
    start: int = 0
    _entries: dict[Node, dict[str, Node]] = field(default_factory=lambda: {ROOT: {}})
    _contents: dict[Node, bytes] = field(default_factory=dict)
    _stamps: dict[Node, tuple[int, int]] = field(default_factory=dict)
    _numbers: dict[int, Node] = field(default_factory=dict)  # the file system's own number of each node
    _count: int = 0
    lock: Any = field(default_factory=threading.RLock)  # a thread may be between a call and what it logs

    def promise(self, what: Any) -> None:
        with self.lock:
            self.scan()
            self.log.append(Promise(what))

    def promised(self, cut: int) -> list[Any]:
        """What had been promised at a cut, oldest first."""
        return [one.what for one in self.log[:cut] if isinstance(one, Promise)]

    def cuts(self, count: int, seed: int) -> list[int]:
        """Places to cut at, spread over all operations since the start, the end among them."""
        places = range(self.start, len(self.log) + 1)
        if count >= len(places):
            return list(places)
        edges = [self.start + (len(places) - 1) * index // (count - 1) for index in range(count)]
        chance = random.Random(seed)
        return [chance.randrange(low, high) for low, high in itertools.pairwise(edges)] + [places[-1]]

    def scan(self) -> None:
        """Logs what was written and created since the last scan."""
        with self.lock:
            self._numbers[os.stat(self.root).st_ino] = ROOT
            self._scan(self.root, ROOT)

    def _scan(self, path: Path, folder: Node) -> None:
        known = self._entries[folder]
        found = {entry.name: entry for entry in os.scandir(path)}
        assert known.keys() <= found.keys(), f"{known.keys() - found.keys()} vanished from {path} without a call"
        for name, entry in sorted(found.items()):
            number, is_folder = entry.inode(), entry.is_dir(follow_symlinks=False)
            assert not entry.is_symlink(), f"{entry.path} is a link, which is not modelled"
            if name in known and number not in self._numbers:  # safetensors puts a file of its own in its place
                self._forget(folder, name)
            if name not in known:
                self._free(number)
                assert number not in self._numbers, f"{entry.path} came from elsewhere without a call"
                self._count += 1
                self._numbers[number] = known[name] = self._count
                if is_folder:
                    self._entries[self._count] = {}
                else:
                    self._contents[self._count] = b""
                self.log.append(Make(folder, name, self._count, is_folder))
            node = known[name]
            assert self._numbers[number] == node, f"{entry.path} came from elsewhere without a call"
            if is_folder:
                self._scan(path / name, node)
            else:
                self._look_at(path / name, node)

    def _free(self, number: int) -> None:
        """Forgets a number that the file system has given again: what had it was replaced, and is looked at later."""
        node = self._numbers.get(number)
        place = None if node is None else self._find(node, self.root, ROOT)
        if place is not None and os.lstat(place).st_ino != number:
            del self._numbers[number]

    def _find(self, node: Node, path: Path, folder: Node) -> Path | None:
        for name, other in self._entries[folder].items():
            if other == node:
                return path / name
            if other in self._entries and (found := self._find(node, path / name, other)) is not None:
                return found
        return None

    def _look_at(self, path: Path, node: Node) -> None:
        seen = os.stat(path)
        stamp = (seen.st_size, seen.st_mtime_ns)
        if self._stamps.get(node) == stamp and time.time_ns() - seen.st_mtime_ns > _FRESH:
            return
        self._stamps[node] = stamp
        before, after = self._contents[node], path.read_bytes()
        if before == after:
            return
        self._contents[node] = after
        changed = (at for at, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1])
        same = len(before) if after.startswith(before) else next(changed, len(after))
        self.log.append(Write(node, same, after[same:], len(after), appends=same == len(before)))

    # --- calls --------------------------------------------------------------------------------------------------------

    def _place(self, path: Any, handle: int | None = None) -> tuple[Node, str] | None:
        """The folder and name that a path means; None outside of the root."""
        place = Path(os.fsdecode(path))
        if handle is not None and not place.is_absolute():
            folder = self._numbers.get(os.fstat(handle).st_ino)
            assert folder is None or place.parent == Path(), "a relative path of more than one name is not modelled"
            return None if folder is None else (folder, place.name)
        place = Path(os.path.realpath(place.parent)) / place.name
        if not place.is_relative_to(self.root) or place == self.root:
            return None
        folder = ROOT
        for name in place.relative_to(self.root).parts[:-1]:
            folder = self._entries[folder][name]
        return folder, place.name

    def removed(self, place: tuple[Node, str] | None) -> None:
        if place is not None:
            self.log.append(Remove(*place, self._forget(*place)))

    def renamed(self, source: tuple[Node, str] | None, target: tuple[Node, str] | None) -> None:
        if source is None and target is None:
            return
        assert source is not None, "a rename into the folder from outside is not modelled"
        assert target is not None, "a rename out of the folder is not modelled"
        folder, name = source
        node = self._entries[folder].pop(name)
        if target[1] in self._entries[target[0]]:
            self._forget(*target)
        self._entries[target[0]][target[1]] = node
        self.log.append(Rename(node, folder, name, *target))

    def synced(self, handle: int) -> None:
        node = self._numbers.get(os.fstat(handle).st_ino)
        if node is not None:
            self.log.append(Sync(node))

    def _forget(self, folder: Node, name: str) -> Node:
        node = self._entries[folder].pop(name)
        self._numbers = {number: one for number, one in self._numbers.items() if one != node}
        self._stamps.pop(node, None)
        return node


@contextlib.contextmanager
def recording(root: Path) -> Iterator[Recording]:
    """Records all that this process does below `root`, in all its threads."""
    record = Recording(Path(os.path.realpath(root)))
    record.scan()
    record.start = len(record.log)

    def patch(name: str, change: Callable[..., Callable[[], None]]) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **named: Any) -> Any:
            with record.lock:
                record.scan()
                told = change(*arguments, **named)  # places are looked up before the call, logged after it
                result = real(*arguments, **named)
                told()
                return result

        patches.setattr(os, name, call)

    def renaming(source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None):
        places = record._place(source, src_dir_fd), record._place(target, dst_dir_fd)
        return lambda: record.renamed(*places)

    def removing(path: Any, *, dir_fd: int | None = None):
        place = record._place(path, dir_fd)
        return lambda: record.removed(place)

    def syncing(handle: int):
        return lambda: record.synced(handle)

    with pytest.MonkeyPatch.context() as patches:
        for names, change in (
            (("rename", "replace"), renaming),
            (("unlink", "remove", "rmdir"), removing),
            (("fsync", "fdatasync"), syncing),
            # These only have to be told apart from what comes before and after them.
            (("mkdir", "ftruncate", "truncate", "write", "pwrite"), lambda *_, **__: record.scan),
        ):
            for name in names:
                patch(name, change)
        yield record
    record.scan()


# --- after the power came back ----------------------------------------------------------------------------------------


def everything(record: Recording) -> Tree:
    """What is there without a power loss: the whole log, replayed."""
    return _apply(record.log, lambda _: True, None)


def after_power_loss(record: Recording, cut: int, chance: random.Random) -> Tree:
    """One of the many things that may be left when the power goes after `cut` operations."""
    log = record.log[:cut]
    durable = [index < record.start for index in range(cut)]
    synced: set[Node] = set()
    for index in reversed(range(record.start, cut)):
        match log[index]:
            case Sync(node):
                synced.add(node)
            case Write(node):
                durable[index] = node in synced
            case Make(folder) | Remove(folder):
                durable[index] = folder in synced
            case Rename(target_folder=folder):
                durable[index] = folder in synced
            case Promise():
                pass
    share = chance.choice((0.0, 0.1, 0.5, 0.9, 1.0))  # of the rest that reached the disk
    return _apply(log, lambda index: durable[index] or chance.random() < share, chance, durable)


def _apply(
    log: Sequence[Operation],
    there: Callable[[int], bool],
    chance: random.Random | None,
    durable: Sequence[bool] = (),
) -> Tree:
    entries: dict[Node, dict[str, Node]] = {ROOT: {}}
    contents: dict[Node, bytes] = {}
    for index, one in enumerate(log):
        if isinstance(one, Make):
            entries.update({one.node: {}} if one.is_folder else {})
            contents.update({} if one.is_folder else {one.node: b""})
        if not there(index):
            continue
        match one:
            case Make(folder, name, node):
                entries[folder][name] = node
            case Write(node):
                whole = chance is None or durable[index] or chance.random() < 0.6
                contents[node] = _written(contents[node], one) if whole else _torn(contents[node], one, chance)
            case Rename(node, _, _, folder, name):
                for names in entries.values():  # a node has one name, also where an earlier rename was lost
                    for old in [old for old, other in names.items() if other == node]:
                        del names[old]
                entries[folder][name] = node
            case Remove(folder, name, node):
                if entries[folder].get(name) == node:
                    del entries[folder][name]
            case Sync() | Promise():
                pass
    return _tree(ROOT, "", entries, contents)


def _written(content: bytes, one: Write) -> bytes:
    start = content[: one.offset].ljust(one.offset, b"\0")
    return (start + one.data + content[one.offset + len(one.data) :])[: one.size].ljust(one.size, b"\0")


def _torn(content: bytes, one: Write, chance: random.Random) -> bytes:
    if not one.appends and chance.random() < 0.4:
        return b""  # cut off, and not written yet
    if chance.random() < 0.4:
        return _written(content, Write(one.node, one.offset, bytes(len(one.data)), one.size, one.appends))
    data = one.data[: chance.randrange(len(one.data) + 1)]
    size = max(one.offset + len(data), min(len(content), one.size))
    return _written(content, Write(one.node, one.offset, data, size, one.appends))


def _tree(folder: Node, path: str, entries: dict[Node, dict[str, Node]], contents: dict[Node, bytes]) -> Tree:
    tree: Tree = {}
    for name, node in sorted(entries[folder].items()):
        tree[path + name] = contents.get(node)
        if node in entries:
            tree.update(_tree(node, f"{path}{name}/", entries, contents))
    return tree


def read_tree(root: Path) -> Tree:
    """A folder as it really is."""
    found = sorted(root.rglob("*"))
    return {path.relative_to(root).as_posix(): None if path.is_dir() else path.read_bytes() for path in found}


def write_tree(tree: Tree, root: Path) -> Path:
    root.mkdir(parents=True)
    for name, content in tree.items():
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)
    return root
