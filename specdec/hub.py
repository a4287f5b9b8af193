"""Files of a checkpoint, from a folder or the hub: small ones one by one, or all that make a target."""

import json
import os
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

from specdec.errors import CheckpointError

_LOCAL = (".", "/", "~")
"""How names begin that can be nothing but paths."""

_OF_A_TARGET = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.txt", "*.jinja")
_NOT_OF_IT = ("*/*", "consolidated*", "training_args*")
"""Other forms of the same weights lie in folders, or under the second name."""


def json_file(name: str, file: str, *, what: str) -> dict[str, Any] | None:
    """The object in a JSON file of a checkpoint; None where the checkpoint has no such file.

    Args:
        name: a folder, or a name on the hub.
        file: its name in there.
        what: the checkpoint is, for messages: "target", "drafter".

    Raises:
        CheckpointError: there is no such checkpoint, it cannot be reached, or the file holds no JSON object.
    """
    path = checkpoint_file(name, file, what=what)
    if path is None:
        return None
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} of {what} {name!r} is not valid JSON ({error}); fetch or write it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} of {what} {name!r} holds no JSON object; fetch or write it again")
    return content


def target_folder(name: str) -> Path:
    """The folder with a target's config, tokenizer and safetensors files, fetched from the hub if it is no local one.

    Raises:
        CheckpointError: it is not on the hub, or the hub cannot be reached and its files are not in the cache.
    """
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(name, allow_patterns=list(_OF_A_TARGET), ignore_patterns=list(_NOT_OF_IT)))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"cannot fetch target {name!r}: the hub is out of reach and its weights are not in the cache;"
            " go online, or give a local folder"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"cannot fetch target {name!r} from the hub: {reason[:160]}; check the name, or give a local folder"
        ) from error


def checkpoint_file(name: str, file: str, *, what: str) -> Path | None:
    """Where a file of a checkpoint lies, fetched if need be; None where the checkpoint has no such file.

    Args:
        name: a folder, or a name on the hub.
        file: its name in there.
        what: the checkpoint is, for messages: "target", "drafter".

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be reached.
    """
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        path = folder / file
        return path if path.is_file() else None
    if name.startswith(_LOCAL) or name.count("/") != 1:
        raise CheckpointError(f"{what} {name!r} is no folder and no name on the hub; give a folder with config.json, or owner/name")
    try:
        return Path(hf_hub_download(name, file))
    except LocalEntryNotFoundError as error:  # before the one below, which it is too
        raise CheckpointError(
            f"cannot fetch {file} of {what} {name!r}: the hub is out of reach and the file is not in its cache;"
            " go online, or give a local folder"
        ) from error
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"cannot fetch {file} of {what} {name!r} from the hub: {reason[:160]}; check the name, or give a local folder"
        ) from error
