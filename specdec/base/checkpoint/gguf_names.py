"""Names of GGUF files: which of them make a model, and what people call them by."""

import re
from collections.abc import Iterable
from pathlib import Path

from specdec.base.errors import CheckpointError
from specdec.base.files import parse_json

GGUF = "gguf.json"
"""In a folder that a GGUF file is unpacked to: names the file and its further parts."""

PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)")
"""In the name of a part of a model: its number, from 1 on, and how many there are."""

QUANT = re.compile(r"(?:UD-)?(?:I?Q\d\w*|TQ\d\w*|B?F16|F32|FP16|MXFP4\w*|NVFP4\w*)", re.IGNORECASE)
"""Names of quantizations, as they stand in names of files."""

USUAL = "Q4_K_M"
"""What is taken of several where nothing is asked for, as llama.cpp does."""

_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_ENDING = re.compile(rf"(?:^|[-._/])({QUANT.pattern})(?:-\d{{5}}-of-\d{{5}})?\.gguf$", re.I)


def whole_model(path: Path) -> list[Path]:
    """The files of the model that a file is a part of, itself where it is a whole one.

    Raises:
        CheckpointError: one is missing.
    """
    parts = [path.with_name(name) for name in part_names(path.name)]
    missing = [part.name for part in parts if len(parts) > 1 and not part.is_file()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of the {len(parts)} parts of {path.name!r} are missing, the first"
            f" being {missing[0]!r}; fetch them all"
        )
    return parts


def part_names(name: str) -> list[str]:
    """Names of all parts of the model that a file of this name is a part of.

    >>> part_names("a-00002-of-00002.gguf"), part_names("a.gguf")
    (['a-00001-of-00002.gguf', 'a-00002-of-00002.gguf'], ['a.gguf'])
    """
    if (found := PART.search(name)) is None:
        return [name]
    begin, count = name[: found.start()], int(found[2])
    return [f"{begin}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def models_among(files: Iterable[str]) -> list[str]:
    """Names of model files among these, the first part of each."""
    found = (file for file in files if file.endswith(".gguf"))
    whole = (file for file in found if (part := PART.search(file)) is None or int(part[1]) == 1)
    return sorted(file for file in whole if not _NO_MODEL.search(file.rpartition("/")[2]))


def chosen(files: Iterable[str], quant: str | None) -> str | None:
    """The one of several models that is meant; None where that is not clear.

    Args:
        files: names, see `models_among`.
        quant: a quantization; None for the only one, or `USUAL`.

    >>> chosen(["a-Q4_K_M.gguf", "a-UD-Q4_K_M.gguf", "a-Q8_0.gguf"], "q4_k_m")
    'a-Q4_K_M.gguf'
    """
    models = models_among(files)
    if quant is None and len(models) == 1:
        return models[0]
    wanted = (quant or USUAL).lower()
    fitting = [file for file in models if (quant_of(file) or "").lower() == wanted]
    return fitting[0] if len(fitting) == 1 else None


def quant_of(file: str) -> str | None:
    """The quantization that a file is named by; None for none."""
    found = _ENDING.search(file)
    return found[1] if found else None


def gguf_file(folder: Path) -> Path | None:
    """The GGUF file, or its first part, with the weights of a local checkpoint; None for none.

    Args:
        folder: what a file was unpacked to, or one with a file, config.json and no safetensors.

    Raises:
        CheckpointError: it holds several.
    """
    if (folder / GGUF).is_file():
        return Path(parse_json((folder / GGUF).read_bytes())["files"][0])
    if any(folder.glob("*.safetensors*")):
        return None
    found = models_among(path.name for path in folder.glob("*.gguf"))
    if len(found) > 1:
        what = f"{str(folder)!r} holds {len(found)} GGUF files"
        raise CheckpointError(f"{what}; name one of them, such as {str(folder / found[0])!r}")
    return folder / found[0] if found else None
