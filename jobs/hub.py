"""Data sets of the Hugging Face hub, as local files."""

from __future__ import annotations

import re
from pathlib import Path

from valuspec.errors import ValuSpecError

_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class NoDataError(ValuSpecError):
    """What was named is neither a file nor a data set that can be had."""


def dataset_files(source: str) -> list[Path]:
    """The file of this name, else the .jsonl files of the data set. Raises NoDataError.

    Only JSON lines are taken from the hub: they need no code to be read.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if not _NAME.fullmatch(source):
        raise NoDataError(f"{source} is no file, and not the name of a data set (owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(source, repo_type="dataset", allow_patterns=["*.jsonl"])
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise NoDataError(
            f"{source} is no file here, and the hub did not give it: {error}"
        ) from error
    files = sorted(Path(folder).rglob("*.jsonl"))
    if not files:
        raise NoDataError(f"the data set {source} has no .jsonl file")
    return files
