"""A disk that is full from one operation of our choice on, until the run pauses and somebody makes room.

Every operation below a folder that may need room has a name: the process, what it does (open to write, write, sync,
mkdir, rename), the file, and a number for those that are alike. All of them are recorded, so a test can fail each one.
Safetensors' own writer would escape: `check_all_seen` finds files that no recorded operation has made.
The state lies in files, since the process that writes checkpoints meets the same disk. It has no site-packages: no
pytest or torch here.
"""

import builtins
import errno
import io
import os
import re
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

_DIGITS = re.compile(r"(tmp|old)-[0-9a-f]{16}")
_open, _write, _fsync = os.open, os.write, os.fsync


class Disk:
    def __init__(self, root: Path, state: Path, process: str = "trainer") -> None:
        """`state` is a folder outside of `root`."""
        self.root, self.process = os.path.realpath(root), process
        self.log, self.at, self.full, self.met = (state / name for name in ("log", "at", "full", "met"))
        self.lock, self.seen = threading.Lock(), Counter[str]()
        self.before = {path.stat().st_ino for path in Path(self.root).rglob("*")}

    def make_room(self, *_: object) -> None:
        self.full.unlink(missing_ok=True)

    def operations(self) -> list[str]:
        return self.log.read_text().splitlines()

    def check_all_seen(self) -> None:
        made = {name.split(" ")[2] for name in self.operations()}
        for path in Path(self.root).rglob("*"):
            if path.stat().st_ino in self.before:
                continue
            name = path.relative_to(self.root).as_posix()
            parts = [one for one in made if one == name or one.startswith((f"{name}.tmp-", f"{name}/"))]
            inside = [one for one in made if re.fullmatch(_published(name), one)]
            assert parts or inside, f"{name} was made by no operation that was recorded"

    def meet(self, what: str, path: Any) -> None:
        place = os.path.join(os.path.realpath(os.path.dirname(os.fspath(path)) or "."), os.path.basename(path))
        if not place.startswith(self.root + os.sep):
            return
        file = _DIGITS.sub(r"\1-*", os.path.relpath(place, self.root))
        kind = f"{self.process} {what} {file}"
        with self.lock:
            self.seen[kind] += 1
            name = f"{kind} {self.seen[kind]}"
            handle = _open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            _write(handle, f"{name}\n".encode())
            os.close(handle)
            if self.at.exists() and self.at.read_text() == name:
                self.at.rename(self.met)
                self.full.touch()
        if self.full.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    @contextmanager
    def installed(self) -> Iterator[None]:
        with ExitStack() as patches:
            for place, name, call in self._calls():
                patches.enter_context(mock.patch.object(place, name, call))
            yield

    def install(self) -> None:
        """For the life of this process."""
        for place, name, call in self._calls():
            setattr(place, name, call)

    def _calls(self) -> Iterator[tuple[Any, str, Any]]:
        real = {name: getattr(os, name) for name in ("open", "write", "fsync", "mkdir", "rename", "replace")}
        opened, disk = io.open, self

        class Raw(io.FileIO):
            def write(self, content: Any) -> int | None:
                disk.meet("write", self.name)
                return super().write(content)

        def open_file(file: Any, mode: str = "r", buffering: int = -1, *more: Any, **named: Any) -> Any:
            if isinstance(file, int) or not set(mode) & set("wxa+") or named.get("opener"):
                return opened(file, mode, buffering, *more, **named)
            disk.meet("open", file)
            raw = Raw(os.fspath(file), mode.replace("b", "").replace("t", ""))
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *more, **named)

        def open_handle(path: Any, flags: int, *more: Any, **named: Any) -> int:
            if flags & os.O_CREAT and not os.path.lexists(path):
                disk.meet("open", path)
            return real["open"](path, flags, *more, **named)

        def of_handle(name: str, what: str) -> Any:
            def call(handle: int, *more: Any) -> Any:
                if stat.S_ISREG(os.fstat(handle).st_mode):  # a folder that is synced needs no room
                    disk.meet(what, os.readlink(f"/proc/self/fd/{handle}"))
                return real[name](handle, *more)

            return call

        def renaming(name: str) -> Any:
            def call(source: Any, target: Any, **named: Any) -> None:
                disk.meet("rename", target)
                real[name](source, target, **named)

            return call

        def make_folder(path: Any, *more: Any, **named: Any) -> None:
            disk.meet("mkdir", path)
            real["mkdir"](path, *more, **named)

        yield from ((builtins, "open", open_file), (io, "open", open_file), (os, "open", open_handle))
        yield from ((os, "write", of_handle("write", "write")), (os, "fsync", of_handle("fsync", "sync")))
        yield from (
            (os, "rename", renaming("rename")),
            (os, "replace", renaming("replace")),
            (os, "mkdir", make_folder),
        )


def _published(name: str) -> str:
    """A pattern for the name that a file had in the folder that became `name`'s."""
    folder, slash, rest = name.rpartition("/")
    return re.escape(folder).replace("/", r"(?:\.tmp-\*)?/") + r"(?:\.tmp-\*)?" + re.escape(slash + rest) + r"(?:/.*)?"
