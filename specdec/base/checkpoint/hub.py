"""Files of a checkpoint, from a folder or the hub: small ones one by one, or all of a model.

A name on the hub is `owner/name`, and may go on: `owner/name:folder` for a checkpoint in a folder
of the repository, `owner/name:file.gguf` or `owner/name:Q4_K_M` for a GGUF file, and `@revision` at
its end for a branch, a tag or a commit. A GGUF file stands for a folder with what it says of its
model, see `verifiers.weights.gguf_folder`.
"""

import json
import logging
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
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

from specdec.base.checkpoint.gguf_names import (
    GGUF,
    QUANT,
    USUAL,
    chosen,
    gguf_file,
    models_among,
    part_names,
    quant_of,
)
from specdec.base.checkpoint.tensor_files import weight_files
from specdec.base.errors import CheckpointError, InvalidInputError, UnsupportedModelError, one_line
from specdec.base.registry import PARTS, resolve

logger = logging.getLogger(__name__)

CONFIG = "config.json"

_SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "tokenizer*", "README.md")
_WEIGHTS, _PICKLES = ("*.safetensors", "mask_embedding.pt"), ("*.bin",)
_OTHERS = ("adapter_model*", "consolidated*", "optimizer*", "training_args*")
"""Not fetched: other weights, or the same in another form; nor folders, but for templates."""

_WORD = r"\w[\w.-]*"
_NAME = re.compile(rf"({_WORD}(?:/{_WORD})?)(?::({_WORD}(?:/{_WORD})*))?(?:@(\w[^\s:@?*\[\\^~]*))?")

_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How Transformers writes numbers for which JSON has no words: as an object that names one."""

_FOUND: dict[str, Path] = {}
"""Where each name was found last in this process, which reports tell of."""

_UNPACKED: dict[str, Path] = {}
"""Folders to which GGUF files were unpacked, by their names on the hub."""


class _Place(NamedTuple):
    """What a name on the hub says."""

    repo: str
    folder: str | None
    revision: str | None

    def inside(self, snapshot: Path) -> Path:
        return snapshot / self.folder if self.folder else snapshot

    @property
    def names_gguf(self) -> bool:
        """Whether it is a GGUF file, by its name or its quantization."""
        asked = self.folder or ""
        return asked.endswith(".gguf") or QUANT.fullmatch(asked) is not None

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
    if name == "embedded" or _is_here(name):
        what = f"revision {revision!r} is of a checkpoint on the hub, and {name!r} is none"
        raise InvalidInputError(f"{what}; leave it out")
    if "@" in name:
        raise InvalidInputError(f"{name!r} names a revision already; leave out {revision!r}")
    return f"{name}@{revision}"


def unpinned(name: str) -> str:
    """A name on the hub without its revision; any other name as it is."""
    return name if _is_here(name) else name.partition("@")[0]


def json_file(name: str, file: str, *, what: str) -> dict[str, Any] | None:
    """The object in a JSON file of a checkpoint; None where the checkpoint has no such file.

    Raises:
        CheckpointError: no such checkpoint, it cannot be reached, or the file is no JSON object.
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
        message = f"{path.name} of {what} {name!r} is not valid JSON ({one_line(error)})"
        raise CheckpointError(f"{message}; fetch or write it again") from error
    if not isinstance(content, dict):
        message = f"{path.name} of {what} {name!r} holds no JSON object"
        raise CheckpointError(f"{message}; fetch or write it again")
    return content


def _decoded(found: dict[str, Any]) -> Any:
    """An object of a JSON file, or the number that it stands for.

    >>> _decoded({"__float__": "Infinity"}), _decoded({"a": 1})
    (inf, {'a': 1})
    """
    return _FLOATS.get(str(found["__float__"]), found) if found.keys() == {"__float__"} else found


def checkpoint_folder(
    name: str | Path, *, what: str, weights: bool = True, snapshot: Path | None = None
) -> Path:
    """The folder with a checkpoint's files, fetched from the hub if it is no local one.

    Args:
        name: a folder, a GGUF file, or a name on the hub; a `Path` is none on the hub.
        what: the checkpoint is, for messages.
        weights: fetch them, too, as a GGUF file always is; pickled ones if there are no others.
        snapshot: what this returned before: weights must be of the same revision.

    Raises:
        CheckpointError: no such checkpoint, or it is not in the cache and the hub out of reach.
    """
    folder = local_folder(name, what)
    if folder is None and snapshot is not None and (snapshot / GGUF).is_file():
        folder = snapshot
    if folder is None:
        place = _place(name, what)
        if snapshot is not None:
            place = place._replace(revision=revision_of(snapshot) or place.revision)
        if place.names_gguf:
            folder = _of_gguf(place, str(name), what)
        else:
            folder = _of_files(place, str(name), what, weights)
    _FOUND[str(name)] = folder
    return folder


def _of_files(place: _Place, name: str, what: str, weights: bool) -> Path:
    """The folder of a checkpoint that may be a GGUF file, though its name does not say so."""
    folder = _fetched(place, name, what, (*_SMALL, *_WEIGHTS) if weights else _SMALL)
    if not (folder / CONFIG).is_file() and models_among(_listed(place)):
        return _of_gguf(place, name, what)
    if weights and not any(folder.glob("*.safetensors*")):
        place = place._replace(revision=revision_of(folder) or place.revision)
        folder = _fetched(place, name, what, (*_SMALL, *_PICKLES))
        if not _has_weights(folder) and (models := models_among(_listed(place))):
            shown = f"{place.repo}:{quant_of(models[0]) or models[0]}"
            alone = f"has GGUF files alone; name one, such as {shown}"
            raise CheckpointError(f"{what} {name!r} {alone}")
    return folder


def _of_gguf(place: _Place, name: str, what: str) -> Path:
    """What the GGUF file that a name on the hub means is unpacked to.

    Raises:
        CheckpointError: it means none or several, or one that cannot be fetched.
    """
    if name in _UNPACKED:
        return _UNPACKED[name]
    asked = place.folder or ""
    file, root = asked, ""
    if not asked.endswith(".gguf"):
        quant = asked if place.names_gguf else None
        root = f"{asked}/" if asked and quant is None else ""
        files = _listed(place._replace(folder=None) if quant else place)
        models = models_among(files)
        file = chosen(files, quant) or ""
        if not file:
            quants = sorted({one for model in models if (one := quant_of(model))})
            known = ", ".join(quants or models[:4]) or "none at all"
            meant = (
                f"means no one GGUF file of {quant or USUAL}; there is {known}: name one of them"
            )
            raise CheckpointError(f"{what} {name!r} {meant}")
        if quant is None and len(models) > 1:
            taken = "%s: %s is taken of %d GGUF files; name another as %s:Q8_0"
            logger.warning(taken, name, file, len(models), place.repo)
    try:
        fetch = partial(hf_hub_download, place.repo, revision=place.revision)
        parts = [fetch(root + part) for part in part_names(file)]
    except Exception as error:  # the hub's client lets errors of its HTTP library through
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            lacks = f"has no file {root + file!r}; check the name"
            raise CheckpointError(f"{what} {place.repo!r} {lacks}") from error
        raise _refusal(error, place, name, what, f"{root + file} is") from error
    _UNPACKED[name] = _unpacked(Path(parts[0]), name, what)
    return _UNPACKED[name]


def checkpoint_file(name: str, file: str, *, what: str) -> Path | None:
    """Where a file of a checkpoint lies, fetched if need be; None where there is none.

    With the hub out of reach, a file is missing if the cache has its revision's config.

    Args:
        name: a folder, or a name on the hub.
        file: its name in there.
        what: the checkpoint is, for messages: "target", "drafter".

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be reached.
    """
    folder, place = local_folder(name, what), None
    if folder is None:
        place = _place(name, what)
        folder = _of_gguf(place, name, what) if place.names_gguf else _UNPACKED.get(name)
    if place is None or (folder is not None and (folder / file).is_file()):
        assert folder is not None
        return folder / file if (folder / file).is_file() else None
    try:
        path = hf_hub_download(place.repo, file, subfolder=place.folder, revision=place.revision)
        return Path(path)
    except LocalEntryNotFoundError as error:  # before the one below, which it is too
        if file != CONFIG and place.cached is not None and (place.cached / CONFIG).is_file():
            return None
        raise _refusal(error, place, name, what, f"{file} is") from error
    except EntryNotFoundError:
        if file == CONFIG and name not in _UNPACKED and models_among(_listed(place)):
            return _of_gguf(place, name, what) / file
        return None
    except Exception as error:  # the hub's client lets errors of its HTTP library through
        raise _refusal(error, place, name, what, f"{file} is") from error


def found_folder(name: str) -> Path | None:
    """Where a checkpoint's files lie on this machine, or would be; None where they are not."""
    if name in _FOUND:
        return _FOUND[name]
    if (folder := local_folder(name)) is not None:
        return folder
    match = _NAME.fullmatch(name)
    return _Place(*match.groups()).cached if match else None


def revision_of(folder: Path) -> str | None:
    """The commit of a folder, or of its GGUF file, in the hub's cache; None for any other."""
    origin = gguf_file(folder) if (folder / GGUF).is_file() else None
    match = re.search(r"/snapshots/([0-9a-f]{40})(/|$)", (origin or folder).absolute().as_posix())
    return match[1] if match else None


def gguf_of(name: str | Path) -> Path | None:
    """The GGUF file with a checkpoint's weights, or its first part; None for none, or none here."""
    folder = local_folder(name) or _UNPACKED.get(str(name))
    return None if folder is None else gguf_file(folder)


def files_of(name: str | Path) -> list[str]:
    """Names of a checkpoint's files, also in its folders; the cache's without a hub."""
    folder = local_folder(name) or _UNPACKED.get(str(name))
    return _listed(_place(name, "checkpoint")) if folder is None else _inside(folder)


def _listed(place: _Place) -> list[str]:
    """Files that the hub lists."""
    try:
        root = f"{place.folder}/" if place.folder else ""
        listed = HfApi().model_info(place.repo, revision=place.revision, timeout=10).siblings or []
        names = [file.rfilename for file in listed]
        return [name.removeprefix(root) for name in names if name.startswith(root)]
    except Exception:  # it is asked to explain an error, and must not be another
        return [] if place.cached is None else _inside(place.cached)


def _inside(folder: Path) -> list[str]:
    paths = [*folder.glob("*"), *folder.glob("*/*")]
    return [path.relative_to(folder).as_posix() for path in paths]


def local_folder(name: str | Path, what: str = "checkpoint") -> Path | None:
    """The folder of a checkpoint here: its own, or of its unpacked GGUF file; None for others.

    Raises:
        CheckpointError: a GGUF file that is damaged or none of a model, or a folder with several.
        UnsupportedModelError: a model that is not read from GGUF files.
    """
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        folder = Path(path)
        if (folder / CONFIG).is_file():
            return folder
        with _naming(name, what):
            file = gguf_file(folder)
        return folder if file is None else _unpacked(file, name, what)
    is_file = path.endswith(".gguf") and os.path.isfile(path)
    return _unpacked(Path(path), name, what) if is_file else None


def _unpacked(file: Path, name: str | Path, what: str) -> Path:
    with _naming(name, what):
        folder: Path = resolve(PARTS, "gguf", "part")(file)
    return folder


@contextmanager
def _naming(name: str | Path, what: str) -> Iterator[None]:
    """Puts before a message what the user calls the checkpoint."""
    try:
        yield
    except (CheckpointError, UnsupportedModelError) as error:
        raise type(error)(f"{what} {str(name)!r}: {error}") from error


def _is_here(name: str | Path) -> bool:
    path = os.path.expanduser(name)
    return os.path.isdir(path) or (path.endswith(".gguf") and os.path.isfile(path))


def _place(name: str | Path, what: str) -> _Place:
    """What a name says that is no folder's.

    Raises:
        CheckpointError: it can be no name on the hub.
    """
    is_path = isinstance(name, Path) or os.path.exists(os.path.expanduser(name))
    match = None if is_path else _NAME.fullmatch(str(name))
    if str(name).endswith(".gguf") and (match is None or match[2] is None):
        way_out = "check the path, or name one on the hub as owner/name:file.gguf"
        raise CheckpointError(f"{what} {str(name)!r} is no file; {way_out}")
    if match is None or ".." in (match[3] or "") or ("/" not in match[1] and what != "target"):
        message = f"{what} {str(name)!r} is not a folder, and no name on the hub"
        way_out = f"give a folder with {CONFIG}, a GGUF file, owner/name, or owner/name:folder"
        raise CheckpointError(f"{message}; {way_out}")
    place = _Place(*match.groups())
    if place.revision and re.fullmatch("[0-9a-f]{4,39}", place.revision) and place.cached is None:
        begun = [path.name for path in (place.cache / "snapshots").glob(f"{place.revision}*")]
        return place._replace(revision=begun[0]) if len(begun) == 1 else place
    return place


def _fetched(place: _Place, name: str, what: str, patterns: tuple[str, ...]) -> Path:
    """The folder of a checkpoint, with those of its files that have such names."""
    root = f"{place.folder}/" if place.folder else ""
    ignored = [f"{root}{other}" for other in _OTHERS] + [
        f"{root}*/{one}" for one in patterns if one != "*.jinja"
    ]
    allowed = [f"{root}{one}" for one in patterns]
    try:
        snapshot = snapshot_download(
            place.repo,
            revision=place.revision,
            allow_patterns=allowed,
            ignore_patterns=ignored,
        )
        folder = place.inside(Path(snapshot))
    except LocalEntryNotFoundError as error:  # also where some of the files are not in the cache
        cached, weights = place.cached, not {*_WEIGHTS, *_PICKLES}.isdisjoint(patterns)
        if cached is None or (weights and not _has_weights(cached)):
            raise _refusal(
                error, place, name, what, "its weights are" if weights else "its files are"
            ) from error
        return cached
    except Exception as error:  # the hub's client lets errors of its HTTP library through
        raise _refusal(error, place, name, what, "") from error
    if place.folder and not folder.is_dir():
        lacks = f"has no folder {place.folder!r}; check the name"
        raise CheckpointError(f"{what} {place.repo!r} {lacks}")
    return folder  # which is not there if the repository has no such file at all


def _has_weights(folder: Path) -> bool:
    files = weight_files(folder)
    return bool(files) and all((folder / file).is_file() for file in files)


def _refusal(error: Exception, place: _Place, name: str, what: str, lacks: str) -> CheckpointError:
    """The error for a user of what the hub's client raised; `lacks` says what the cache lacks."""
    page = f"{constants.ENDPOINT}/{place.repo}"
    if isinstance(error, GatedRepoError):
        return CheckpointError(
            f"{what} {name!r} is gated: accept the terms at {page}, set HF_TOKEN, and run again"
        )
    if isinstance(error, RepositoryNotFoundError):
        message = f"{what} {name!r} is neither a folder nor on the hub ({page}), or it is private"
        return CheckpointError(f"{message}; check the name, or set HF_TOKEN")
    if isinstance(error, RevisionNotFoundError):
        message = f"{what} {place.repo!r} has no revision {place.revision!r}"
        return CheckpointError(f"{message}; name a branch, a tag or a commit of it")
    if isinstance(error, LocalEntryNotFoundError):
        return CheckpointError(
            f"cannot fetch {what} {name!r}: the hub is out of reach and {lacks} not in its cache;"
            " go online, or give a local folder"
        )
    message = f"cannot fetch {what} {name!r} from the hub: {one_line(error, 160)}"
    return CheckpointError(f"{message}; check the name, or give a local folder")
