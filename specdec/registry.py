"""Names of what can be chosen, and where it lives: the core names the other packages only here, as strings."""

from difflib import get_close_matches
from importlib import import_module
from typing import Any

from specdec.errors import InvalidInputError

ATTENTION_BACKENDS = {
    "rocm_aiter_fa": "specdec.attention.aiter.fa:RocmAiterFaBackend",
    "rocm_aiter_fa_shuffle": "specdec.attention.aiter.fa:RocmAiterFaShuffleBackend",
    "triton_fa": "specdec.attention.triton.fa:TritonFaBackend",
    "torch_ref": "specdec.attention.torch_ref.fa:TorchRefBackend",
}
"""In order of preference for `auto`."""

MLA_BACKENDS = {
    "rocm_aiter_mla_sparse": "specdec.attention.aiter.mla_sparse:RocmAiterMlaSparseBackend",
    "rocm_aiter_mla": "specdec.attention.aiter.mla:RocmAiterMlaBackend",
    "torch_ref": "specdec.attention.torch_ref.mla:TorchRefMlaBackend",
}
"""For models with latent attention, in order of preference for `auto`."""

DRAFTERS = {
    "ngram": "drafters.ngram:load_ngram",
    "dflash": "drafters.dflash.drafter:load_dflash",
    "embedded": "drafters.embedded:load_embedded",
}
"""Functions `(path | None, *, verifier) -> Drafter`."""

VERIFIERS = {
    "hf": "verifiers.load:load_verifier",
}
"""Functions `(name_or_path, *, device, dtype, attention) -> (Verifier, tokenizer)`."""

COMMANDS = {
    "generate": "specdec.cli.generate:run",
    "compare": "evals.bench.compare:run",  # generate --compare
    "eval": "evals.accuracy.command:run",
    "bench": "evals.bench.command:run",
    "profile": "evals.profile.command:run",
    "train": "drafters.training.command:run",
    "doctor": "specdec.cli.doctor:run",
}
"""Functions `(argparse.Namespace) -> exit status`, named as strings so that `--help` imports none of them."""


def drafter_name(name: str | None, target: str) -> str:
    """The drafter that `name` stands for beside a target: "auto" is the embedded model's own, and n-gram lookup for all others.

    >>> drafter_name("auto", "embedded"), drafter_name("auto", "some/model"), drafter_name("ngram", "embedded")
    ('embedded', 'ngram', 'ngram')
    >>> drafter_name(None, "embedded")
    'none'
    """
    if name == "auto":
        return "embedded" if target == "embedded" else "ngram"
    return "none" if name is None else name


def resolve(table: dict[str, str], name: str, kind: str) -> Any:
    """Imports and returns what `name` stands for.

    Raises:
        InvalidInputError: the name is not in the table; the message lists all names, near ones first.
    """
    if name not in table:
        near = get_close_matches(name, table, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidInputError(f"unknown {kind} {name!r}{hint} (known: {', '.join(table)})")
    module, _, attribute = table[name].partition(":")
    return getattr(import_module(module), attribute)
