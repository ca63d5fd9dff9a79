"""Where commands write: found out before they compute for minutes."""

import tempfile
from pathlib import Path


def writable_folder(option: str, name: str | Path) -> Path:
    """The folder that a user named by `option`, made if need be.

    Raises ValueError if nothing can be written there.
    """
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{option} is {name}: {error.strerror}") from error
    return folder
