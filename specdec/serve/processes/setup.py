"""What fronts are told before they serve."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec.base.chat.messages import knows_tools
from specdec.base.chat.tools import FORMATS, ToolFormat, format_of
from specdec.base.files import user_path
from specdec.base.registry import parts_of
from specdec.serve.config import ServeConfig
from specdec.session.link.channel import Facts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Setup:
    """An engine, and how it is served.

    Attributes:
        facts: of the engine.
        config: limits.
        model: the model's name if the config has none; of a folder, its last part.
        drafter: name of what drafts; None where nothing does.
    """

    facts: Facts
    config: ServeConfig
    model: str
    drafter: str | None = None

    def message(self) -> tuple[str, bytes]:
        """What a front is sent first. A pickle is code, so no other message is one."""
        return "setup", pickle.dumps(self)

    @classmethod
    def read(cls, message: list[Any]) -> Setup:
        """What `message` made."""
        made: Setup = pickle.loads(message[1])
        return made

    @property
    def names(self) -> tuple[str, ...]:
        """By which the model is called."""
        return self.config.served_model_name or (last_part(self.model),)

    def tool_format(self, tokenizer: PreTrainedTokenizerBase) -> ToolFormat | None:
        """How the model writes calls of tools, where that is known."""
        named = self.config.tool_format
        return format_of(tokenizer) if named is None else FORMATS[named]

    def said_of_tools(self, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """How tools are called, in one line; None where the template knows none."""
        form, named = self.tool_format(tokenizer), self.config.tool_format
        if not knows_tools(tokenizer):
            what = (
                "the chat template tells the model of no tools, so requests with tools are refused"
            )
            return what if named else None
        if form is None:
            return "tools are called with tool_choice required alone, unless --tool-format says how"
        whence = "the chat template has it" if named is None else "--tool-format says"
        return f"tools are called in the format {form.name}, as {whence}"

    @property
    def drafter_name(self) -> str | None:
        """What clients are told of what drafts."""
        return None if self.drafter is None else "+".join(map(last_part, parts_of(self.drafter)))

    @property
    def short_cache(self) -> str | None:
        """Says so where the cache holds less than the context."""
        admission = self.facts.admission
        context, most = admission.max_model_len, admission.max_total_tokens
        if most >= context:
            return None
        return (
            f"the cache holds {most:,} tokens of one request and the context has {context:,};"
            " a larger --kv-memory allows more, and --max-model-len says less"
        )


def last_part(name: str) -> str:
    """The last part of a folder's path, or the name; no text becomes question marks."""
    path = user_path(name)
    found = path.resolve().name or name if path.exists() else name
    return found.encode(errors="replace").decode()
