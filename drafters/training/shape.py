"""The shape of a new drafter, derived from its target, and its first weights."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from drafters.dflash.config.checkpoint import read_checkpoint
from drafters.dflash.config.config import DFlashConfig, default_taps, entry_of
from drafters.dflash.convolution import DFlashConvolution
from drafters.dflash.drafter import check_fit
from drafters.dflash.model import DFlashModel
from drafters.dflash.tied import checkpoint_names, tie
from drafters.training.config import TrainConfig
from drafters.training.families.choice import TrainedModel, unrolled_model
from drafters.training.loss.heads import init_head, new_head
from specdec.base.errors import InvalidInputError
from specdec.layers.rotary.rotary import STATIC_ROPE_TYPES


def make_drafter(config: TrainConfig, verifier: Any, tokenizer: Any) -> TrainedModel:
    """A drafter for this target in float32 on the CPU: a new one, or the one that `init` names.

    Raises:
        InvalidInputError, CheckpointError: see `dflash_drafter` and `unrolled_model`.
    """
    found = unrolled_model(config, verifier)
    return dflash_drafter(config, verifier, tokenizer) if found is None else found


def dflash_drafter(config: TrainConfig, verifier: Any, tokenizer: Any) -> DFlashModel:
    """A DFlash drafter; see `make_drafter`.

    Raises:
        InvalidInputError: a tap or the mask token does not suit the target.
        CheckpointError: `init` cannot be read, or was made for another target.
    """
    if config.unroll is not None:
        what = f"unroll is {config.unroll}, and DFlash drafters write a block at once"
        way_out = "leave it out, or name an EAGLE-3 drafter or mtp as --init"
        raise InvalidInputError(f"{what}; {way_out}")
    known: dict[str, Tensor] = {}
    if config.init is None:
        shape = new_config(config, verifier, tokenizer)
    else:
        shape, known = read_checkpoint(config.init)
        if peculiar := shape.untrainable(known):
            what = f"drafter {config.init!r} has {peculiar}, which training does not know"
            raise InvalidInputError(f"{what}; leave --init out")
        check_fit(shape, verifier, borrows=True)
        if not shape.scaled_like(verifier):
            raise InvalidInputError(
                f"drafter {config.init!r} scales embeddings or caps logits unlike its target, and"
                " training does as the target; leave --init out"
            )
        _check_taps(shape.target_layer_ids, verifier)
        shape = replace(shape, coupling=None)  # it was fitted to what the drafter said before
    shape = with_options(shape, config)
    own_embeddings = "embed_tokens.weight" in known
    model = DFlashModel(shape, own_embeddings=own_embeddings, own_head="lm_head.weight" in known)
    for part in (model.embed_tokens, model.lm_head):  # they are kept as they are
        if part is not None:
            part.requires_grad_(False)
    if model.config.tied_tables:
        tie(model, verifier)
    generator = torch.Generator().manual_seed(config.seed)
    names = checkpoint_names(model)
    new = {names[name] for name in names.keys() - known.keys()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and f"{name}.weight" in new:
            nn.init.normal_(module.weight, std=0.02, generator=generator)
    for name, module in model.named_modules():
        if isinstance(module, DFlashConvolution) and f"{name}.base_kernel" in new:
            module.make_identity()
    some = torch.arange(min(1000, verifier.vocab_size), device=verifier.device)
    init_head(model, new, generator, verifier.embed(some).float().std().item())
    state = {names[n]: tensor if n == "d2t" else tensor.float() for n, tensor in known.items()}
    model.load_state_dict(state, strict=False)
    return model


def with_options(shape: DFlashConfig, config: TrainConfig) -> DFlashConfig:
    """`shape` with what the options add; what a checkpoint has stays.

    Raises:
        InvalidInputError: the checkpoint has another head.
    """
    head = new_head(config)
    if shape.head is not None and head not in (None, shape.head):
        what = f"drafter {config.init!r} has another head, {shape.head}"
        raise InvalidInputError(f"{what}; leave --head out, or start without --init")
    if config.draft_vocab is not None and config.init is None:
        if config.draft_vocab >= shape.vocab_size:
            what = f"draft-vocab is {config.draft_vocab}"
            way_out = f"it must be below the target's {shape.vocab_size} tokens"
            raise InvalidInputError(f"{what}; {way_out}")
        shape = replace(shape, draft_vocab_size=config.draft_vocab)
    elif config.draft_vocab not in (None, shape.draft_vocab_size):
        raise InvalidInputError(
            f"drafter {config.init!r} drafts {shape.draft_vocab_size or 'all'} tokens, and"
            f" draft-vocab is {config.draft_vocab}; leave it out, or start without --init"
        )
    if shape.head is None and head is not None:
        shape = replace(shape, head=head, tied_tables=config.tied_tables)
    if config.convolutions and not shape.convolves:
        shape = replace(shape, conv_kernel_size=2, conv_group_size=16)
    return shape


def new_config(config: TrainConfig, verifier: Any, tokenizer: Any) -> DFlashConfig:
    """Configuration of a new drafter; what the user leaves open is the target's.

    Raises:
        InvalidInputError: a tap or the mask token does not suit the target.
    """
    target = verifier.config
    target_heads = entry_of(target, "num_attention_heads")
    heads = config.heads or target_heads
    kv_heads = config.kv_heads or (
        config.heads or entry_of(target, "num_key_value_heads") or target_heads
    )
    head_dim = config.head_dim or entry_of(target, "head_dim") or target.hidden_size // target_heads
    if heads % kv_heads or head_dim % 2:
        raise InvalidInputError(
            f"{heads} query heads on {kv_heads} key heads of {head_dim}: the first must be a"
            f" multiple of the second, the third even"
        )
    taps = config.taps or default_taps(verifier.num_layers, config.layers)
    _check_taps(taps, verifier)
    sliding = config.layers - 1 if config.window else 0
    return DFlashConfig(
        block_size=config.block_size,
        mask_token_id=choose_mask_token(config.mask_token, tokenizer, verifier),
        target_layer_ids=tuple(taps),
        windows=(config.window,) * sliding + (None,) * (config.layers - sliding),
        causal=(True,) * sliding + (False,) * (config.layers - sliding),
        hidden_size=verifier.hidden_size,
        intermediate_size=config.intermediate
        or entry_of(target, "intermediate_size")  # a target of experts alone has none
        or 3 * verifier.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=verifier.vocab_size,
        rope_parameters=_rope(getattr(target, "rope_parameters", None) or {}),
        max_position_embeddings=verifier.max_model_len,
        rms_norm_eps=entry_of(target, "rms_norm_eps") or 1e-6,
        num_target_layers=verifier.num_layers,
        verifier_name=verifier.name,
        verifier_architectures=tuple(target.architectures or ()),
    )


def choose_mask_token(asked: int | None, tokenizer: Any, verifier: Any) -> int:
    """Token whose embedding fills the rows to predict: `asked`, or one that never occurs.

    First choice are embedding rows that no token uses, which files made of GGUF call `[PAD<row>]`,
    then special tokens without a part in chats.

    Raises:
        InvalidInputError: `asked` is a word of the vocabulary or has a part of its own, or the
            tokenizer has no token to spare.
    """
    used = {
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
        *verifier.eos_token_ids,
    }
    template = getattr(tokenizer, "chat_template", None) or ""
    special = {
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special
        and token_id not in used
        and token.content not in template
        and token_id < verifier.vocab_size
    }
    tokens = {row: token for token, row in tokenizer.get_vocab().items()}
    rows = range(verifier.vocab_size)
    unused_rows = [row for row in rows if tokens.get(row, f"[PAD{row}]") == f"[PAD{row}]"]
    unused_rows = [row for row in unused_rows if row not in used]
    suggestion = unused_rows[0] if unused_rows else max(special, default=None)
    hint = f"choose a reserved token such as {suggestion}"
    if suggestion is None:
        hint = "this tokenizer has no token to spare"
    if asked is None:
        if suggestion is None:
            what = f"{hint} for the mask"
            way_out = "add a special token to the target's tokenizer, or name one by --mask-token"
            raise InvalidInputError(f"{what}; {way_out}")
        return suggestion
    if not 0 <= asked < verifier.vocab_size:
        what = f"mask-token is {asked} and the target has {verifier.vocab_size} embeddings"
        raise InvalidInputError(f"{what}; {hint}")
    if asked in used:
        raise InvalidInputError(f"mask-token {asked} begins, ends or pads texts; {hint}")
    if asked not in unused_rows and asked not in special:
        text = tokenizer.decode([asked])
        raise InvalidInputError(f"mask-token {asked} is {text!r}, which real texts hold; {hint}")
    return asked


def _check_taps(taps: Sequence[int], verifier: Any) -> None:
    """The last layer is no tap either: not every checkpoint layout can name it."""
    if min(taps) < 0 or max(taps) > verifier.num_layers - 2 or len(set(taps)) < len(taps):
        raise InvalidInputError(
            f"taps {list(taps)} are not different layers before the last of {verifier.name}, which"
            f" has {verifier.num_layers};"
            f" choose from 0 to {verifier.num_layers - 2}, or fewer draft --layers"
        )


def _rope(target: Mapping[str, Any]) -> dict[str, Any]:
    """The target's rotary embedding where a drafter can have it, else a plain one with its base."""
    static = target.get("rope_type", "default") in STATIC_ROPE_TYPES
    plain = static and target.get("partial_rotary_factor") in (None, 1)
    if "rope_theta" not in target:
        # several kinds of layers, each with its own base
        return {"rope_type": "default", "rope_theta": 1e6}
    return dict(target) if plain else {"rope_type": "default", "rope_theta": target["rope_theta"]}
