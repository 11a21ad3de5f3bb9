"""Where a model's files lie on this machine. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path


def model_folder(name: str) -> Path | None:
    """The folder itself, or for a name of the hub the snapshot in its cache; None if it is not here (yet)."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None
