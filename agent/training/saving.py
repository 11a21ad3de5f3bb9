"""What is done around verl's save: is there room, is what was written whole, and which older ones go.

The order is ``check_space``, ``begin``, verl's own save, ``finish``, ``prune``. Everything is decided from what lies in
the folder, so it is the same after a restart. verl alone writes in place, looks at nothing, and forgets older
checkpoints with its process (``BaseCheckpointManager.previous_saved_paths``).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agent.training.checkpoints import (
    MANIFEST,
    REFUSED,
    SCHEMA,
    Checkpoint,
    best,
    by_age,
    checkpoints,
    shard_names,
    world_sizes,
)
from agent.training.model_folder import model_folder
from agent.training.rundir import RunDir

BYTES_PER_PARAMETER = 12  # float32 weights (verl's masters) and AdamW's two moments
HEADROOM = 1.05  # tokenizer, schedule, zip directories
MARGIN = 64 << 20  # bytes left free for logs and figures
CRC_LIMIT = 16 << 30  # bytes; larger checkpoints are not read again
TRACKER = "latest_checkpointed_iteration.txt"  # verl's: the step that resume_mode=auto loads
_GOING = ".deleting-"


class SaveRefused(RuntimeError):
    """A checkpoint was not begun for want of room, or is not whole; the message is one line for the user."""


# -- before ----------------------------------------------------------------------------------------------------------


def expected_bytes(run: RunDir, model: str) -> int:
    """Bytes that the next checkpoint will take.

    As many as the newest whole one; if there is none, 12 for each parameter in the safetensors files of ``model`` (a
    folder, or a name of the hub; their headers are read) plus 5 %. 0 if there are no such files on this machine.
    """
    if whole := by_age(checkpoints(run)):
        return whole[-1].size
    if (model_path := model_folder(model)) is None:
        return 0
    parameters = sum(_parameters(file) for file in _weights(model_path))
    return math.ceil(parameters * BYTES_PER_PARAMETER * HEADROOM)


def _weights(model_path: Path) -> list[Path]:
    """The safetensors files that transformers loads; a folder may hold the same weights in another form as well."""
    if (index := model_path / "model.safetensors.index.json").is_file():
        return [model_path / name for name in set(json.loads(index.read_bytes())["weight_map"].values())]
    one = model_path / "model.safetensors"
    return [one] if one.is_file() else sorted(model_path.glob("*.safetensors"))


def _parameters(file: Path) -> int:
    """From the header: its length in 8 bytes, then JSON (https://huggingface.co/docs/safetensors)."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def check_space(run: RunDir, model: str) -> None:
    """Raise ``SaveRefused`` if the next checkpoint and 64 MiB more do not fit on the disk of ``run.checkpoints``.

    To be called before verl begins to write: a disk that fills up in a save leaves a torn checkpoint.
    """
    place = run.checkpoints
    while not place.exists():
        place = place.parent
    free, needed = shutil.disk_usage(place).free, expected_bytes(run, model) + MARGIN
    if free < needed:
        raise SaveRefused(
            f"no room for a checkpoint: it needs {needed / 1e9:.2f} GB, and {place} has {free / 1e9:.2f} GB free; "
            f"nothing was written; {_kept(run)}; make room or keep fewer (mmqa.keep_checkpoints), then --resume auto"
        )


def _kept(run: RunDir) -> str:
    whole = by_age(checkpoints(run))
    return f"step {whole[-1].step} is kept, whole" if whole else "there is no whole checkpoint yet"


def begin(run: RunDir, step: int) -> None:
    """Take away what an earlier course of the run left as ``global_step_<step>``.

    verl would write over it file by file. A kill in between would leave shards of both courses under the old manifest,
    and after a change of the number of GPUs those of the old number would stay.
    """
    if (folder := run.checkpoints / f"global_step_{step}").exists():
        _remove(folder)
        point_tracker(run)


# -- after -----------------------------------------------------------------------------------------------------------


def finish(run: RunDir, step: int, attempt: int) -> dict[str, Any]:
    """Verify what verl saved as ``global_step_<step>``, bring it to the disk, and write its manifest, last.

    Returns the manifest: ``{"schema", "step", "attempt", "world_size", "files": {relative name: bytes}, "bytes",
    "written": unix time in seconds}``. Raises ``SaveRefused`` if a file is missing or not whole; verl's tracker then
    names the newest whole step again.

    Each shard's zip directory and the headers that it points to are read: 1 ms for a file of 1 GB. The checksums of
    all members too if the checkpoint has at most 16 GiB: 0.3 to 0.4 s a GB just after writing (torch.save itself: 4 s a
    GB, fsync 0.4 s; two cores, 2026-11-29). A larger one may have left the page cache, and would come from the disk.
    """
    folder = run.checkpoints / f"global_step_{step}"
    try:
        return write_manifest(folder, step, attempt)
    except (SaveRefused, OSError) as error:
        what = f"{Path(error.filename or '').name}: {error.strerror}" if isinstance(error, OSError) else error
        with suppress(OSError):
            (folder / REFUSED).write_text(f"{what}\n", encoding="utf-8")
        with suppress(OSError):
            point_tracker(run)
        raise SaveRefused(
            f"the checkpoint is not whole: {what}; {_kept(run)}; look at the disk, then --resume auto"
        ) from None


def write_manifest(folder: Path, step: int, attempt: int) -> dict[str, Any]:
    """``finish`` for any folder in verl's layout. Raises ``SaveRefused`` (what is wrong, no advice) and ``OSError``."""
    names = _expected(folder)
    crc = sum((folder / name).stat().st_size for name in names if (folder / name).is_file()) <= CRC_LIMIT
    for name in names:
        if problem := _file_problem(folder / name, crc):
            raise SaveRefused(f"{name} {problem}")
    for name in (MANIFEST, REFUSED):
        (folder / name).unlink(missing_ok=True)
    written = sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))
    for file in [*written, *(one for one in folder.rglob("*") if one.is_dir())]:
        _sync(file)
    sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in written}
    manifest = {
        "schema": SCHEMA,
        "step": step,
        "attempt": attempt,
        "world_size": world_sizes(folder)[0],
        "files": sizes,
        "bytes": sum(sizes.values()),
        "written": round(time.time(), 3),
    }
    _replace(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    _sync(folder.parent)
    return manifest


def _expected(folder: Path) -> list[str]:
    """What the folder must hold; the number of ranks is that of the shards."""
    sizes = world_sizes(folder)
    if len(sizes) != 1:
        raise SaveRefused(f"actor/ has shards of {' and '.join(map(str, sizes)) or 'no'} ranks")
    return [*shard_names(sizes[0]), "data.pt"]


def _file_problem(file: Path, crc: bool) -> str | None:
    """Why a file of torch.save (a zip archive of stored members) is not whole, or None."""
    if not file.is_file():
        return "is missing"
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            for member in members:
                archive.open(member).close()  # compares the header at its place with the directory
            if crc and (bad := archive.testzip()):
                return f"is damaged: {bad} does not have its checksum"
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError, OSError) as error:
        return f"is cut short or damaged ({error})"
    spare = file.stat().st_size - sum(member.compress_size for member in members)
    if not members or not 0 <= spare <= 65536 + 1024 * len(members):  # headers, and padding to 64 bytes
        return f"has {file.stat().st_size} bytes, which its {len(members)} members do not account for"
    return None


# -- older ones ------------------------------------------------------------------------------------------------------


def prune(run: RunDir, keep: int | None, keep_best: bool) -> list[int]:
    """Delete older checkpoints, and return their steps, ascending.

    The newest ``keep`` whole ones stay (None or not above 0: all), with ``keep_best`` also the one with the highest
    validation reward, and in any case the newest. Torn ones of lower steps than the newest whole one are deleted; of
    higher steps they stay and are printed. An interrupted deletion is completed by the next call.
    """
    for left in run.checkpoints.glob(f"{_GOING}*"):
        shutil.rmtree(left, ignore_errors=True)
    point_tracker(run)
    found = checkpoints(run)
    if not (whole := by_age(found)):
        return []
    wanted = set(whole if keep is None or keep <= 0 else whole[-keep:])
    if keep_best and (highest := best(found)):
        wanted.add(highest)
    going = [one for one in found if one not in wanted and _may_go(one, whole[-1])]
    for one in going:
        _remove(one.path)
    return [one.step for one in going]


def _may_go(one: Checkpoint, newest: Checkpoint) -> bool:
    if one.problem and one.step > newest.step:
        print(f"mmqa: the checkpoint of step {one.step} is left as it is: {one.problem}")
        return False
    return True


def point_tracker(run: RunDir) -> int | None:
    """Make verl's tracker name the newest whole step, and return it; without one the tracker is removed.

    verl writes the tracker before anything is verified, and ``resume_mode=auto`` loads what it names.
    """
    tracker = run.checkpoints / TRACKER
    if not (whole := by_age(checkpoints(run))):
        tracker.unlink(missing_ok=True)
        return None
    step = whole[-1].step
    if not tracker.is_file() or tracker.read_text().strip() != str(step):
        _replace(tracker, str(step))
    return step


def _remove(folder: Path) -> None:
    """Delete a checkpoint. It loses its name first: what an interruption leaves does not look like a checkpoint."""
    going = folder.with_name(_GOING + folder.name)
    shutil.rmtree(going, ignore_errors=True)
    os.rename(folder, going)
    _sync(folder.parent)
    shutil.rmtree(going, ignore_errors=True)


def _replace(path: Path, text: str) -> None:
    """Write a small file whole: readers, and a machine that loses its power, see the old text or the new one."""
    scratch = path.with_name(f".{path.name}.part")
    with _named(path):
        scratch.write_text(text, encoding="utf-8")
        _sync(scratch)
        os.replace(scratch, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Bring a file's bytes, or a folder's names, to the disk."""
    with _named(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let an ``OSError`` say which file it was: those of write and fsync do not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
