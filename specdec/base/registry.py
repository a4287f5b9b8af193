"""Names of what can be chosen, and where it lives: the core knows other packages only here."""

import os
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NamedTuple

from specdec.base.errors import InvalidInputError

ATTENTION_BACKENDS = {
    "rocm_aiter_fa": "specdec.attention.aiter.fa:RocmAiterFaBackend",
    "rocm_aiter_fa_shuffle": "specdec.attention.aiter.fa:RocmAiterFaShuffleBackend",
    "triton_fa": "specdec.attention.triton.fa:TritonFaBackend",
    "torch_ref": "specdec.attention.torch_ref.fa:TorchRefBackend",
}
"""In order of preference for `auto`."""

MLA_BACKENDS = {
    "rocm_aiter_mla_sparse": "specdec.attention.aiter.latent.mla_sparse:RocmAiterMlaSparseBackend",
    "rocm_aiter_mla": "specdec.attention.aiter.latent.mla:RocmAiterMlaBackend",
    "torch_ref": "specdec.attention.torch_ref.mla:TorchRefMlaBackend",
}
"""For models with latent attention, in order of preference for `auto`."""

KERNELS = {
    "argmax": "specdec.sampling.argmax:KERNEL",
    "sampler": "specdec.sampling.sampler:KERNEL",
    "candidates": "specdec.sampling.trees.candidates:KERNEL",
    "trees": "specdec.sampling.trees.trees:KERNEL",
    "tries": "specdec.sampling.trees.tries:KERNEL",
    "matches": "drafters.suffix.search:KERNEL",
    "forecasts": "drafters.composed.calibration:KERNEL",
    "edges": "drafters.dflash.edges:KERNEL",
    "block_rows": "specdec.model.block_rows:KERNEL",
    "acceptance": "specdec.engine.acceptance:KERNEL",
    "angles": "specdec.layers.rotary.rotary:KERNEL",
    "cache_rows": "specdec.model.cache_rows:KERNEL",
    "masks": "specdec.sampling.masks:KERNEL",
    "embedding": "specdec.layers.ops.fused:EMBEDDING",
    "few_rows": "specdec.layers.ops.fused:FEW_ROWS",
    "packed": "specdec.layers.packed.check:KERNEL",
    "blocks": "specdec.layers.packed.check:BLOCKS",
    "experts": "specdec.layers.experts.experts:KERNEL",
    "aiter_router": "specdec.layers.experts.router:KERNEL",
    "recurrence": "specdec.layers.recurrence.check:KERNEL",
    "grouped_convolution": "specdec.layers.ops.fused:GROUPED_CONVOLUTION",
    "fused_layers": "specdec.layers.ops.fused:FUSED_LAYERS",
    "aiter_layers": "specdec.layers.aiter.check:KERNEL",
}
"""Every `specdec.kernels.kernel.Kernel`, each behind those that its check uses."""

DRAFTERS: dict[str, str | Callable[..., Any]] = {
    "ngram": "drafters.ngram:load_ngram",
    "suffix": "drafters.suffix.drafter:load_suffix",
    "dflash": "drafters.dflash.drafter:load_dflash",
    "dflash2": "drafters.dflash.drafter:load_dflash",
    "dspark": "drafters.dflash.drafter:load_dflash",
    "eagle3": "drafters.eagle3.drafter:load_eagle3",
    "peagle": "drafters.eagle3.drafter:load_eagle3",
    "draft-model": "drafters.draft_model.drafter:load_draft_model",
    "mtp": "drafters.mtp.load:load_mtp",
    "domino": "drafters.dflash.drafter:load_dflash",
    "lilicorr": "drafters.dflash.drafter:load_dflash",
    "xpress": "drafters.dflash.drafter:load_dflash",
    "smollm2-dflash": "drafters.shipped:load_shipped",
}
"""Functions `(path | None, *, verifier) -> Drafter`, by the name of a drafter or an algorithm."""

WEIGHT_READERS = {"quantized": "verifiers.formats.plain:plain_numbers"}
"""Functions `(tensors, quantization_config, dtype) -> tensors` that unpack what is stored."""

COMPOSITION = "drafters.composed.drafter:ComposedDrafter"
"""Makes one drafter of several: `(parts) -> Drafter`."""

PREDICTIONS = "drafters.predicted.drafter:BoundPredicted"
"""Copies predictions beside a drafter: `(drafter, bound, verifier, *, num_slots, max_len)`."""

CHECKPOINTS = {"drafter": "drafters.load:load_drafter"}
"""Functions that read from a checkpoint what is to load it: `(path, *, verifier) -> Drafter`."""

VERIFIERS = {"hf": "verifiers.load:load_verifier"}
"""Functions `(name_or_path, *, device, dtype, attention) -> (Verifier, tokenizer)`."""

TOKENIZERS = {"hf": "verifiers.weights.tokenizer:load_tokenizer"}
"""Functions `(name_or_path) -> tokenizer`, of targets loaded by the one of that name above."""

PARTS = {
    "compare": "evals.bench.compare:run",  # generate --compare
    "train bench": "evals.bench.training:run",
    "learn": "drafters.training.learning.served:trainable",  # serve --learn-device
    "needs": "verifiers.needs:read_needs",  # doctor --model
    # generate --file, in the words of requests to the server
    "batch line": "specdec.serve.batch.lines:BatchLine",
    "line wishes": "specdec.serve.batch.lines:line_wishes",
    "line prompt": "specdec.serve.batch.lines:line_prompt",
    "fit": "drafters.fit:read_fit",  # doctor --drafter
    "quantization": "verifiers.formats.method:check_quantization",  # the same
    "shard": "verifiers.weights.plain_shard:plain_shard",  # of a drafter that ranks divide
    "drafter": "drafters.algorithms:drafter_and_target",  # --model, which must not be one
    "gguf": "verifiers.weights.gguf_folder:unpacked",  # a GGUF file wherever a checkpoint is named
    # --drafter mtp, whose layers are like those of the target
    "prediction": "verifiers.prediction:read_prediction",
    "prediction weights": "verifiers.prediction_weights:PredictionWeights",  # train --init mtp
}
"""What the command line and drafters take from a package that they do not import."""


class Verb(NamedTuple):
    """A command of `specdec`.

    Attributes:
        name: its first word.
        summary: its line in `specdec --help`.
        home: a module with `add_arguments(parser)` and `run(args) -> exit status`, which imports
            torch inside `run` alone.
    """

    name: str
    summary: str
    home: str


VERBS = (
    Verb(
        "generate",
        "complete prompts, or compare the speed with plain decoding",
        "specdec.cli.generate",
    ),
    Verb(
        "serve", "answer requests over HTTP, in the form of OpenAI's API", "specdec.serve.command"
    ),
    Verb("eval", "score tasks of lm-eval with and without drafts", "evals.accuracy.command"),
    Verb("bench", "measure acceptance and speed over prompt sets", "evals.bench.command"),
    Verb(
        "profile",
        "show which kernels a decoding step spends its time in, and write a trace",
        "evals.profile.command",
    ),
    Verb("train", "train a drafter on the target's own answers", "drafters.training.command"),
    Verb(
        "couple",
        "fit a DFlash drafter's weights for sampling, so that more drafts are accepted",
        "drafters.training.couple",
    ),
    Verb("convert", "write a drafter's checkpoint in another layout", "drafters.convert"),
    Verb(
        "warmup",
        "compile the kernels that a configuration needs, before a request waits for them",
        "specdec.cli.warmup",
    ),
    Verb(
        "doctor",
        "show the device, what is installed, and which attention backends work",
        "specdec.cli.doctor.doctor",
    ),
)


def drafter_name(name: str | None, target: str) -> str:
    """The drafter that `name` means: "auto" is the embedded model's own, else n-gram lookup.

    >>> drafter_name("auto", "embedded"), drafter_name("auto", "some/model")
    ('smollm2-dflash', 'ngram')
    >>> drafter_name("ngram", "embedded")
    'ngram'
    >>> drafter_name("suffix+auto", "embedded")
    'suffix+smollm2-dflash'
    >>> drafter_name(None, "embedded")
    'none'
    """
    if name is not None and len(names := parts_of(name)) > 1:
        return "+".join(drafter_name(one, target) for one in names)
    if name == "auto":
        return "smollm2-dflash" if target == "embedded" else "ngram"
    if name == "embedded":
        return "smollm2-dflash"  # its name in an earlier version
    return "none" if name is None else name


def parts_of(name: str) -> list[str]:
    """The drafters that a name puts together (see `find_drafter`), or the one that it names.

    >>> parts_of("suffix+auto"), parts_of("ngram")
    (['suffix', 'auto'], ['ngram'])
    """
    return [name] if os.path.exists(os.path.expanduser(name)) else name.split("+")


def register_drafter(name: str, loader: str | Callable[..., Any]) -> None:
    """Gives a drafter a name in this process, for `from_pretrained` and for `config.json` files.

    Args:
        loader: `(path | None, *, verifier) -> Drafter`, or where it is as "module:function".

    Raises:
        InvalidInputError: the name is taken, or cannot be told from a path.
    """
    if name in DRAFTERS or name in ("auto", "none"):
        raise InvalidInputError(f"there is a drafter {name!r} already; choose another name")
    if not name or any(mark in name for mark in "/:+"):
        what = f"{name!r} is no name for a drafter"
        raise InvalidInputError(f"{what}; choose a word without /, : and +")
    DRAFTERS[name] = loader


def resolve(table: Mapping[str, str | Callable[..., Any]], name: str, kind: str) -> Any:
    """Imports and returns what `name` stands for.

    Raises:
        InvalidInputError: the name is not in the table; the message lists all, near ones first.
    """
    if name not in table:
        raise unknown_name(table, name, kind)
    home = table[name]
    return import_attribute(home) if isinstance(home, str) else home


def import_attribute(home: str) -> Any:
    """What "module:attribute" names.

    Raises:
        InvalidInputError: no such module, or nothing of that name in it.
    """
    module, _, attribute = home.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), attribute]):
        what = f"{home!r} names nothing that can be imported"
        raise InvalidInputError(f"{what}; write module:function, such as my.drafters:load")
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        raise InvalidInputError(
            f"{home!r} cannot be imported: there is no module {error.name!r} on Python's path"
        ) from error
    except AttributeError as error:
        raise InvalidInputError(f"{home!r} cannot be imported: {error}") from error


def unknown_name(known: Collection[str], name: str, kind: str) -> InvalidInputError:
    """The error of a name that is not known; its message lists all names, near ones first."""
    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return InvalidInputError(f"unknown {kind} {name!r}{hint} (known: {', '.join(known)})")
