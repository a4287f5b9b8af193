"""Whether the layers for multi-token prediction of a public target would load, told by a tiny
target of its type.
"""

import tempfile
from functools import cache
from pathlib import Path

import torch

from drafters.load import load_drafter
from drafters.mtp.load import load_mtp
from specdec.base.errors import SpecDecError
from tests.checks.public_targets import TOO_LARGE, target_needs
from tests.helpers.tiny_assistants import gemma4_target, write_assistant
from tests.helpers.tiny_predictions import CASES, reference, write_target
from verifiers.config.families import FAMILIES
from verifiers.load import load_verifier


def refusal(target: str, model: str | None) -> str | None:
    """What is in the way; None when they load.

    Args:
        target: a name in the list of public targets.
        model: the tiny model of its type; None where there is none.
    """
    if model is not None:
        return _tiny_refusal(model)
    needs = target_needs(target, 2**63)
    kind = needs.text_type or needs.model_type
    known = kind in FAMILIES and FAMILIES[kind].prediction
    if missing := [reason for reason in needs.missing if not reason.startswith(TOO_LARGE)]:
        return "its target does not run: " + "; ".join(missing)
    return f"layers of targets of type {kind!r} are {'not checked' if known else 'not read'} yet"


@cache
def _tiny_refusal(model: str) -> str | None:
    assistant = model.startswith("gemma4")
    with tempfile.TemporaryDirectory() as path:
        folder, cpu = Path(path), torch.device("cpu")
        try:
            if assistant:
                write_assistant(
                    folder / "assistant",
                    gemma4_target(folder / "target", model),
                    clusters=model == "gemma4_shared",
                )
                load_drafter(
                    folder / "assistant",
                    verifier=load_verifier(folder / "target", device=cpu, dtype=torch.float32)[0],
                )
            else:
                write_target(folder, reference(model), CASES[model][0])
                load_mtp(verifier=load_verifier(folder, device=cpu, dtype=torch.float32)[0])
        except SpecDecError as error:
            return str(error).replace(path, "...")
        except ImportError as error:  # an older transformers
            return str(error).partition(" (")[0]
    return None
