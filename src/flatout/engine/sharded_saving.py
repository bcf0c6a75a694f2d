"""A checkpoint that all processes write: each its own slices, and the first one what says that they are whole.

Order: the first process makes the temporary folder; all write their files there, hashed and durable; their entries are
gathered; the first process writes the rest, the manifest last, and renames the folder. A process that fails on the way
fails them all, and the folder goes: a checkpoint is whole or absent, as in the plain form (checkpoints/checkpoint.py).
They may try again then, together (engine/full_disk.py).
"""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flatout.checkpoints.checkpoint import Checkpoint, checkpoint_path
from flatout.checkpoints.checkpoint_files import commit, set_aside, write_files
from flatout.checkpoints.slices import SLICED_FILES, entry_of, joined_entries, slice_file
from flatout.files import disk_errors
from flatout.folders import whole_folder
from flatout.model.tensor_file import pieces_of
from flatout.world import World

if TYPE_CHECKING:
    from flatout.parallel.sharding import Sharding

_SLICED = {f"{name}.safetensors" for name in SLICED_FILES}


def write_sharded(folder: Path, checkpoint: Checkpoint, sharding: "Sharding", world: World) -> tuple[Path, int]:
    """Writes `folder/step-N` from all processes, of which `checkpoint` holds the slices; returns it and its size."""
    target, work = checkpoint_path(folder, checkpoint.step), None
    size = 0
    with contextlib.ExitStack() as held:
        with world.together():
            if world.first:
                held.enter_context(disk_errors(f"checkpoint {target}"))
                work = held.enter_context(whole_folder(target))
        place = Path(world.told(str(work)))
        with world.together(), disk_errors(f"checkpoint {target}"):
            own = _write_own(place, checkpoint, sharding)
        everybody = world.gather(own)
        with world.together():
            if work is not None:
                files = {name: entry for part in everybody for name, entry in part["files"].items()}
                parts = {name: joined_entries([part["slices"][name] for part in everybody]) for name in SLICED_FILES}
                whole = {name: tensors for name, tensors in checkpoint.tensor_files().items() if name not in _SLICED}
                pieces = {name: pieces_of(tensors) for name, tensors in whole.items()}
                files |= write_files(work, pieces, checkpoint.text_files())
                commit(work, checkpoint.step, files, parts)
                size = sum(entry["bytes"] for entry in files.values())
                if target.is_symlink() or target.exists():
                    set_aside(target, "superseded")
                held.close()
    return target, world.told(size)


def _write_own(folder: Path, checkpoint: Checkpoint, sharding: "Sharding") -> dict[str, Any]:
    """Writes this process's slices; returns entries of the files and of what is in them."""
    files: dict[str, Any] = {}
    slices: dict[str, Any] = {}
    for name in SLICED_FILES:
        file = slice_file(name, sharding.number, sharding.count)
        tensors: dict[str, Tensor] = getattr(checkpoint, name)
        entries: dict[str, Any] = {}
        for key, tensor in tensors.items() if sharding.writes else ():
            one = sharding.slice_of(key, tensor)
            if one is None and sharding.number == 0:
                entries[key] = entry_of(file, tensor.shape, 0, tensor)
            elif one is not None and one.rows:
                entries[key] = entry_of(file, one.shape, one.start, tensor)
        slices[name] = entries
        if entries:
            files |= write_files(folder, {file: pieces_of({key: tensors[key] for key in entries})}, {})
    return {"files": files, "slices": slices}
