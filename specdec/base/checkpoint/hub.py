"""Files of a checkpoint, from a folder or the hub: small ones one by one, or all that make a target or a drafter.

A name on the hub is `owner/name`, and may go on: `owner/name:folder` for a checkpoint in a folder of the repository, and
`@revision` at its end for a branch, a tag or a commit.
"""

import json
import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from specdec.base.checkpoint.tensor_files import weight_files
from specdec.base.errors import CheckpointError, InvalidInputError, one_line

CONFIG = "config.json"

_SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "tokenizer*", "README.md")
_WEIGHTS, _PICKLES = ("*.safetensors", "mask_embedding.pt"), ("*.bin",)
_OTHERS = ("adapter_model*", "consolidated*", "optimizer*", "training_args*")
"""Not fetched: other weights, or the same in another form. Folders are left alone as well, but for their templates."""

_WORD = r"\w[\w.-]*"
_NAME = re.compile(rf"({_WORD}(?:/{_WORD})?)(?::({_WORD}(?:/{_WORD})*))?(?:@(\w[^\s:@?*\[\\^~]*))?")

_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How Transformers writes numbers for which JSON has no words: as an object that names one."""

_FOUND: dict[str, Path] = {}
"""Where each name was found last in this process: what reports tell of, whatever has come to the cache since."""


class _Place(NamedTuple):
    """What a name on the hub says."""

    repo: str
    folder: str | None
    revision: str | None

    def inside(self, snapshot: Path) -> Path:
        return snapshot / self.folder if self.folder else snapshot

    @property
    def cache(self) -> Path:
        """Folder of the repository in the hub's cache."""
        return Path(constants.HF_HUB_CACHE) / f"models--{self.repo.replace('/', '--')}"

    @property
    def cached(self) -> Path | None:
        """Where the cache has files of the checkpoint; None where it has none."""
        ref = self.cache / "refs" / (self.revision or "main")
        commit = ref.read_text().strip() if ref.is_file() else self.revision
        found = self.inside(self.cache / "snapshots" / commit) if commit else None
        return found if found is not None and found.is_dir() else None


def pinned(name: str, revision: str | None) -> str:
    """A name on the hub with a revision.

    >>> pinned("owner/name", "v1.0"), pinned("embedded", None)
    ('owner/name@v1.0', 'embedded')

    Raises:
        InvalidInputError: the name has one already, or is of something else.
    """
    if revision is None:
        return name
    if name == "embedded" or _local(name) is not None:
        raise InvalidInputError(f"revision {revision!r} is of a checkpoint on the hub, and {name!r} is none; leave it out")
    if "@" in name:
        raise InvalidInputError(f"{name!r} names a revision already; leave out {revision!r}")
    return f"{name}@{revision}"


def unpinned(name: str) -> str:
    """A name on the hub without its revision; any other name as it is."""
    return name if _local(name) is not None else name.partition("@")[0]


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
    return None if path is None else json_object(path, name, what=what)


def json_object(path: Path, name: str, *, what: str) -> dict[str, Any]:
    """The object in a JSON file of the checkpoint that the user calls `name`.

    Raises:
        CheckpointError: the file holds no JSON object.
    """
    try:
        content = json.loads(path.read_bytes(), object_hook=_decoded)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} of {what} {name!r} is not valid JSON ({one_line(error)}); fetch or write it again"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} of {what} {name!r} holds no JSON object; fetch or write it again")
    return content


def _decoded(found: dict[str, Any]) -> Any:
    """An object of a JSON file, or the number that it stands for.

    >>> _decoded({"__float__": "Infinity"}), _decoded({"a": 1})
    (inf, {'a': 1})
    """
    return _FLOATS.get(str(found["__float__"]), found) if found.keys() == {"__float__"} else found


def checkpoint_folder(name: str | Path, *, what: str, weights: bool = True, snapshot: Path | None = None) -> Path:
    """The folder with a checkpoint's files, fetched from the hub if it is no local one.

    Args:
        name: a folder, or a name on the hub; a `Path` is a folder.
        what: the checkpoint is, for messages.
        weights: fetch them, too. Pickled ones are fetched only where there are no others.
        snapshot: what this returned before: weights must be of the same revision.

    Raises:
        CheckpointError: there is no such checkpoint, or the hub cannot be reached and its files are not in the cache.
    """
    folder = _local(name)
    if folder is None:
        place = _place(name, what)
        if snapshot is not None:
            place = place._replace(revision=revision_of(snapshot) or place.revision)
        folder = _fetched(place, str(name), what, (*_SMALL, *_WEIGHTS) if weights else _SMALL)
        if weights and not any(folder.glob("*.safetensors*")):
            place = place._replace(revision=revision_of(folder) or place.revision)
            folder = _fetched(place, str(name), what, (*_SMALL, *_PICKLES))
    _FOUND[str(name)] = folder
    return folder


def checkpoint_file(name: str, file: str, *, what: str) -> Path | None:
    """Where a file of a checkpoint lies, fetched if need be; None where the checkpoint has no such file.

    Where the hub is out of reach, a file is taken for missing if the cache has the config of the same revision.

    Args:
        name: a folder, or a name on the hub.
        file: its name in there.
        what: the checkpoint is, for messages: "target", "drafter".

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be reached.
    """
    if (folder := _local(name)) is not None:
        path = folder / file
        return path if path.is_file() else None
    place = _place(name, what)
    try:
        return Path(hf_hub_download(place.repo, file, subfolder=place.folder, revision=place.revision))
    except LocalEntryNotFoundError as error:  # before the one below, which it is too
        if file != CONFIG and place.cached is not None and (place.cached / CONFIG).is_file():
            return None
        raise _refusal(error, place, name, what, f"{file} is") from error
    except EntryNotFoundError:
        return None
    except Exception as error:  # the hub's client lets errors of its HTTP library through
        raise _refusal(error, place, name, what, f"{file} is") from error


def found_folder(name: str) -> Path | None:
    """Where the files of a checkpoint lie on this machine: where they were found last, or would be; None where they are not."""
    if name in _FOUND:
        return _FOUND[name]
    if (folder := _local(name)) is not None:
        return folder
    match = _NAME.fullmatch(name)
    return _Place(*match.groups()).cached if match else None


def revision_of(folder: Path) -> str | None:
    """The commit that a folder in the hub's cache has files of; None for any other folder."""
    match = re.search(r"/snapshots/([0-9a-f]{40})(/|$)", folder.absolute().as_posix())
    return match[1] if match else None


def files_of(name: str | Path) -> list[str]:
    """Names of a checkpoint's files, those in its folders among them; what is in the cache where the hub does not tell."""
    folder = _local(name)
    if folder is None:
        place = _place(name, "checkpoint")
        try:
            root = f"{place.folder}/" if place.folder else ""
            listed = HfApi().model_info(place.repo, revision=place.revision, timeout=10).siblings or []
            return [file.rfilename.removeprefix(root) for file in listed if file.rfilename.startswith(root)]
        except Exception:  # it is asked to explain an error, and must not be another
            folder = place.cached
    return [] if folder is None else [path.relative_to(folder).as_posix() for path in [*folder.glob("*"), *folder.glob("*/*")]]


def _local(name: str | Path) -> Path | None:
    path = os.path.expanduser(name)
    return Path(path) if os.path.isdir(path) else None


def _place(name: str | Path, what: str) -> _Place:
    """What a name says that is no folder's.

    Raises:
        CheckpointError: it can be no name on the hub.
    """
    match = None if isinstance(name, Path) or os.path.exists(os.path.expanduser(name)) else _NAME.fullmatch(name)
    if str(name).endswith(".gguf"):
        way_out = "GGUF drafters are not read" if what == "drafter" else "give the folder that holds it beside its config.json"
        raise CheckpointError(f"{what} {str(name)!r} is a GGUF file; {way_out}")
    if match is None or ".." in (match[3] or "") or ("/" not in match[1] and what != "target"):
        raise CheckpointError(
            f"{what} {str(name)!r} is not a folder, and no name on the hub; give a folder with {CONFIG}, owner/name, or"
            " owner/name:folder"
        )
    place = _Place(*match.groups())
    if place.revision and re.fullmatch("[0-9a-f]{4,39}", place.revision) and place.cached is None:
        begun = [path.name for path in (place.cache / "snapshots").glob(f"{place.revision}*")]
        return place._replace(revision=begun[0]) if len(begun) == 1 else place
    return place


def _fetched(place: _Place, name: str, what: str, patterns: tuple[str, ...]) -> Path:
    """The folder of a checkpoint, with those of its files that have such names."""
    root = f"{place.folder}/" if place.folder else ""
    ignored = [f"{root}{other}" for other in _OTHERS] + [f"{root}*/{one}" for one in patterns if one != "*.jinja"]
    allowed = [f"{root}{one}" for one in patterns]
    try:
        folder = place.inside(
            Path(snapshot_download(place.repo, revision=place.revision, allow_patterns=allowed, ignore_patterns=ignored))
        )
    except LocalEntryNotFoundError as error:  # also where some of the files are not in the cache
        cached, weights = place.cached, not {*_WEIGHTS, *_PICKLES}.isdisjoint(patterns)
        if cached is None or (weights and not _has_weights(cached)):
            raise _refusal(error, place, name, what, "its weights are" if weights else "its files are") from error
        return cached
    except Exception as error:  # the hub's client lets errors of its HTTP library through
        raise _refusal(error, place, name, what, "") from error
    if place.folder and not folder.is_dir():
        raise CheckpointError(f"{what} {place.repo!r} has no folder {place.folder!r}; check the name")
    return folder  # which is not there if the repository has no such file at all


def _has_weights(folder: Path) -> bool:
    files = weight_files(folder)
    return bool(files) and all((folder / file).is_file() for file in files)


def _refusal(error: Exception, place: _Place, name: str, what: str, missing: str) -> CheckpointError:
    """The error for a user, of what the hub's client has raised; `missing` is what the cache would have to have."""
    page = f"{constants.ENDPOINT}/{place.repo}"
    if isinstance(error, GatedRepoError):
        return CheckpointError(f"{what} {name!r} is gated: accept the terms at {page}, set HF_TOKEN, and run again")
    if isinstance(error, RepositoryNotFoundError):
        return CheckpointError(
            f"{what} {name!r} is neither a folder nor on the hub ({page}), or it is private; check the name, or set HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError(f"{what} {place.repo!r} has no revision {place.revision!r}; name a branch, a tag or a commit of it")
    if isinstance(error, LocalEntryNotFoundError):
        return CheckpointError(
            f"cannot fetch {what} {name!r}: the hub is out of reach and {missing} not in its cache; go online, or give a local"
            " folder"
        )
    return CheckpointError(
        f"cannot fetch {what} {name!r} from the hub: {one_line(error, 160)}; check the name, or give a local folder"
    )
