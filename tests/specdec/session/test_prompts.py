"""How a conversation becomes tokens: templates and their variables, of a decoder and of a call."""

from pathlib import Path
from typing import Any

import pytest

from drafters.training.config import TrainConfig
from specdec import EngineConfig, SpecDecoder
from specdec.base.config import LoadConfig
from specdec.base.errors import InvalidInputError
from specdec.cli.main import main
from specdec.session.prompts import PromptReader
from tests.helpers.thinking import SWITCHED, thinking_tokenizer
from tests.helpers.tiny_models import paged_verifier, plain_model

CHAT = [{"role": "user", "content": "hi"}]
OFF = {"enable_thinking": False}


def decoder(**options: Any) -> SpecDecoder:
    engine = EngineConfig(max_num_seqs=2, max_model_len=128)
    return SpecDecoder(
        paged_verifier(plain_model("llama")), thinking_tokenizer(SWITCHED), None, engine, **options
    )


def end(one: SpecDecoder, **options: Any) -> str:
    result = one.generate(CHAT, max_tokens=1, **options)
    return str(one.tokenizer.decode(result.prompt_token_ids))[-17:]


def test_thinking_is_switched_by_the_decoder_or_by_a_call() -> None:
    """A call goes before the decoder, and so does the baseline of a comparison."""
    plain, off = decoder(), decoder(chat_template_kwargs=OFF)
    assert end(plain).endswith("assistant ") and end(plain, chat_template_kwargs=OFF).endswith(
        "</think>"
    )
    assert end(off).endswith("</think>") and end(off.plain()).endswith("</think>")
    assert end(off, chat_template_kwargs={"enable_thinking": True}).endswith("assistant ")
    (chunk,) = off.stream(CHAT, max_tokens=1)
    assert chunk.result is not None and off.tokenize(CHAT) == chunk.result.prompt_token_ids
    assert off.tokenize(CHAT, chat_template_kwargs={"enable_thinking": True}) == plain.tokenize(
        CHAT
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "chat_template_kwargs are no JSON"),
        ("[1]", "chat_template_kwargs are '[1]'; give an object, such as"),
        ({"x": {1}}, "chat_template_kwargs are no JSON"),
        (
            {"tokenize": True},
            "chat_template_kwargs names 'tokenize', which is no variable of templates",
        ),
    ],
)
def test_what_is_no_variable(given: Any, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said.replace("[", r"\[")):
        PromptReader.of(thinking_tokenizer(SWITCHED), "m", LoadConfig(chat_template_kwargs=given))
    with pytest.raises(InvalidInputError, match=said.replace("[", r"\[")):
        decoder().generate([CHAT, CHAT], chat_template_kwargs=given)


@pytest.mark.parametrize("name", ["messages", "conversations", "conversation", "tools"])
def test_names_that_the_conversation_has(name: str) -> None:
    """Catches a collision within the tokenizer that is told as a refusal of the messages."""
    with pytest.raises(InvalidInputError, match=f"names '{name}', which is no variable"):
        decoder().tokenize(CHAT, chat_template_kwargs={name: []})


def test_a_template_that_is_no_jinja_is_refused_when_it_is_given() -> None:
    """Catches a server that starts with it and refuses every chat; what a template says of
    messages is no matter then.
    """
    for wrong in ("a\n{{ bad", "a\n{% if %}"):
        with pytest.raises(InvalidInputError, match="is no Jinja template: line 2: "):
            PromptReader.of(thinking_tokenizer(SWITCHED), "m", LoadConfig(chat_template=wrong))
    load = LoadConfig(chat_template="{{ raise_exception('no user first') }}")
    assert PromptReader.of(thinking_tokenizer(SWITCHED), "m", load).has_template


def test_a_template_of_a_file(tmp_path: Path) -> None:
    """Its text is what travels to other machines, and what training compares."""
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}!{{ mood }}", encoding="utf-8")
    given: Any = {"mood": "ü"}
    load = LoadConfig(chat_template=str(file), chat_template_kwargs=given)
    assert load == LoadConfig(chat_template=file.read_text(), chat_template_kwargs='{"mood": "ü"}')
    reader = PromptReader.of(thinking_tokenizer(SWITCHED), "m", load)
    assert reader.chat_text(CHAT, {}) == "hi!ü" and reader.chat_text(CHAT, {"mood": "o"}) == "hi!o"
    assert reader.stated["chat_template_kwargs"] == {"mood": "ü"}
    assert len(reader.stated["chat_template"]) == 64
    config = TrainConfig(out="run", chat_template=str(file), chat_template_kwargs='{ "mood":"ü"}')
    assert (config.chat_template, config.chat_template_kwargs) == (
        load.chat_template,
        load.chat_template_kwargs,
    )
    file.write_text("nothing", encoding="utf-8")
    for wrong in (str(file), str(tmp_path / "none"), str(tmp_path)):
        with pytest.raises(
            InvalidInputError, match="give a file with a Jinja template, or its text"
        ):
            LoadConfig(chat_template=wrong)


@pytest.mark.parametrize("command", ["generate", "bench", "eval"])
def test_commands_tell_what_is_wrong_before_anything_is_loaded(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = {"generate": ["x"], "eval": ["--tasks", "bundled"]}
    line = [command, *rest.get(command, []), "--model", "/nowhere", "--chat-template-kwargs", "{"]
    assert main(line) == 2
    assert "chat_template_kwargs are no JSON" in capsys.readouterr().err
