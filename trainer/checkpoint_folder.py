"""The checkpoints of a run as folders on a disk: which there are, whether one is whole, how one gets into its place.

A checkpoint is written beside its place, made durable, listed in ``files.json`` and renamed. So at any moment, also
when the machine loses its power, what stands under the name of a checkpoint is whole, or can be told from a whole one.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

LEARNER_FOLDER = "learner"
"""What the learner itself has written."""
STATE_FILE = "state.json"
FILES_FILE = "files.json"
"""The size of every other file of the checkpoint, in bytes, by its path in it."""


def checkpoint_path(run_dir: str | Path, step: int) -> Path:
    """The folder of the checkpoint after ``step`` optimizer steps."""
    return Path(run_dir).absolute() / "checkpoints" / f"step_{step}"


def step_of(checkpoint: Path) -> int:
    """The step that the name of a checkpoint's folder says. Raises ``ValueError`` for another name."""
    if not (match := re.fullmatch(r"step_(\d+)", checkpoint.name)):
        raise ValueError(f"{checkpoint} is not named like a checkpoint")
    return int(match[1])


def checkpoints(run_dir: str | Path) -> list[Path]:
    """The checkpoints of a run, oldest first, those that are not whole among them: see :func:`torn`."""
    found = (Path(run_dir).absolute() / "checkpoints").glob("step_*")
    return sorted((path for path in found if re.fullmatch(r"step_\d+", path.name) and path.is_dir()), key=step_of)


def torn(checkpoint: Path) -> str | None:
    """What of a checkpoint is missing, has another size than was written, or holds the zeros that a file system leaves
    in place of what was lost; ``None`` when it is whole.

    One from before files were listed counts as whole if it has its state.
    """
    try:
        listing = checkpoint / FILES_FILE
        sizes = json.loads(listing.read_text(encoding="utf-8")) if listing.exists() else {}
        for name, size in ({STATE_FILE: None} | sizes).items():
            file = checkpoint / name
            if not file.is_file():
                return f"{name} is missing"
            if size is not None and file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes, {size} were written"
            if _begins_with_zeros(file):
                return f"{name} holds zeros where something was written"
    except OSError as error:
        return f"it cannot be read ({error})"
    except (ValueError, TypeError) as error:
        return f"{FILES_FILE} cannot be read ({error})"
    return None


def whole_checkpoints(run_dir: str | Path) -> list[Path]:
    """Those of a run that are whole, oldest first."""
    return [path for path in checkpoints(run_dir) if torn(path) is None]


def _begins_with_zeros(file: Path) -> bool:
    with file.open("rb") as opened:
        head = opened.read(4096)
    return head != b"" and not any(head)  # neither JSON nor what torch saves ever does


def check_room(run_dir: str | Path) -> None:
    """Raise ``OSError`` when the disk has no room for another checkpoint of the size of the newest there is.

    Asked beforehand: a rank that finds the disk full in the middle of a save leaves the others alone in a collective.
    """
    if not (found := checkpoints(run_dir)):
        return
    needed = sum(path.stat().st_size for path in found[-1].rglob("*") if path.is_file())
    free = shutil.disk_usage(found[-1].parent).free  # the folder of the checkpoints may be a link to another disk
    if free < needed:
        raise OSError(
            errno.ENOSPC, f"{free >> 20} MiB are free and a checkpoint takes {needed >> 20} MiB", str(run_dir)
        )


def move_into_place(temporary: Path, final: Path) -> None:
    """Make the checkpoint in ``temporary`` durable and move it to ``final``."""
    files = [path for path in temporary.rglob("*") if path.is_file()]
    sizes = {str(path.relative_to(temporary)): path.stat().st_size for path in files}
    (temporary / FILES_FILE).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
    folders = [path for path in temporary.rglob("*") if path.is_dir()]
    for path in (*files, temporary / FILES_FILE, *folders, temporary):
        _flush(path)
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        _remove(replaced)
        final.rename(replaced)
    temporary.rename(final)
    _flush(final.parent)
    _remove(replaced)


def writing_path(final: Path) -> Path:
    """Where the checkpoint that is to be ``final`` is written before it is moved there."""
    return final.with_name(f".{final.name}.writing")


def drop_unfinished(run_dir: str | Path) -> None:
    """Remove what writing a checkpoint has left that did not come to its end: as much of a disk as a whole one takes,
    and where the disk was full, what the run needs to go on."""
    for path in (Path(run_dir).absolute() / "checkpoints").glob(".step_*.writing"):
        _remove(path)


def leave_branch(run_dir: str | Path, step: int) -> None:
    """A run continues from ``step``: the whole checkpoints of later steps are of a branch that it leaves.

    They lose their names, so that none is taken for one of the steps that are made now, and are dropped with the next
    checkpoint: until then a run that does not get that far has lost nothing.
    """
    for path in whole_checkpoints(run_dir):
        if step_of(path) > step:
            left = path.with_name(f".{path.name}.left")
            _remove(left)
            path.rename(left)


def drop_others(newest: Path, keep: int, spared: Collection[Path] = ()) -> None:
    """Of the checkpoints of a run leave the ``keep`` up to ``newest``, and those that are ``spared``."""
    everything = checkpoints(newest.parent.parent)
    current = everything.index(newest) + 1
    old = [path for path in everything[: max(0, current - keep)] if path not in spared]
    for path in [*old, *everything[current:], *newest.parent.glob(".step_*.left")]:
        _remove(path)


def put_back_replaced(run_dir: str | Path) -> None:
    """Undo a replacement that a kill cut in two: the older checkpoint of the step gets its name again."""
    for path in (Path(run_dir).absolute() / "checkpoints").glob(".step_*.replaced"):
        final = path.with_name(path.name.removeprefix(".").removesuffix(".replaced"))
        if not final.exists():
            path.rename(final)


def _remove(path: Path) -> None:
    """Remove a checkpoint, or the link that stands for one which was moved elsewhere; nothing where there is none."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
