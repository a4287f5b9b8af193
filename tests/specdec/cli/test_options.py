"""Options made from the configuration: every field reaches its dataclass, under one name in all
commands.
"""

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from drafters.training.config import TrainConfig, build_config
from specdec.base.config import CacheConfig, EngineConfig, LoadConfig
from specdec.base.errors import InvalidInputError, SpecDecError
from specdec.base.registry import VERBS
from specdec.cli.fields import add_options, byte_size, from_options
from specdec.cli.main import Parser, main
from specdec.cli.options import engine_config, load_decoder, sampling_params, say_gpu
from specdec.device import device
from specdec.grammar.grammar import Grammar
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class Example:
    """A configuration.

    Attributes:
        count: things to take (`some.module`); None takes
            all of them. More about it.
        share: part of them, in `[0, 1]`.
        mode: a number, or "auto".
        names: what they are called.
    """

    count: int | None = None
    share: float = 0.0
    mode: int | Literal["auto"] | None = "auto"
    names: tuple[str, ...] = ()
    quick: bool = field(default=False, metadata={"help": "100% sooner"})


def parse(*arguments: str, **options: Any) -> argparse.Namespace:
    parser = Parser("example")
    add_options(parser, Example, **options)
    return parser.parse(arguments)


def loaded(monkeypatch: Patch, *arguments: str) -> dict[str, Any]:
    """What the command asks the API to load."""

    class Loaded(Exception):
        pass

    def from_pretrained(target: str, **options: Any) -> Any:
        raise Loaded({"target": target, **options})

    monkeypatch.setattr(SpecDecoder, "from_pretrained", from_pretrained)
    with pytest.raises(Loaded) as caught:
        main(list(arguments))
    asked: dict[str, Any] = caught.value.args[0]
    return asked


def verb_parser(name: str) -> Parser:
    from importlib import import_module

    parser = Parser(name)
    import_module(next(verb.home for verb in VERBS if verb.name == name)).add_arguments(parser)
    return parser


def test_help_says_what_the_docstring_says(capsys: Capture) -> None:
    """Catches lost continuation lines, marks of the docstring, a percent sign that argparse
    formats, and "None" in help.
    """
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--count N things to take (default: all of them)" in text
    assert "--share X part of them, in [0, 1] (default 0)" in text
    assert "--mode N|auto a number, or " in text
    assert "--names TEXT what they are called; may be repeated" in text
    assert "100% sooner" in text
    assert "None" not in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", Example()),
        (
            "--count 3 --share 0.5 --mode 7 --names a --names b --quick",
            Example(3, 0.5, 7, ("a", "b"), True),
        ),
        ("--mode auto --no-quick", Example()),
    ],
)
def test_values_have_the_types_of_their_fields(arguments: str, expected: Example) -> None:
    assert Example(**from_options(Example, parse(*arguments.split()))) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--count x", "'x' is not a whole number"),
        ("--share x", "'x' is not a number"),
        ("--mode x", "'x' is neither a whole number nor auto"),
    ],
)
def test_values_of_other_types_are_refused(arguments: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        parse(*arguments.split())


def test_old_names_work_and_are_not_shown(capsys: Capture) -> None:
    assert parse("--number", "4", old={"count": "--number"}).count == 4
    assert parse("--number", "4", "5", old={"count": "--number"}, several=("count",)).count == [
        4,
        5,
    ]
    assert parse(old={"count": "--number"}, defaults={"count": 2}).count == 2
    with pytest.raises(SystemExit):
        parse("--help", old={"count": "--number"})
    assert "--number" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verb", "old", "new"),
    [
        ("bench", "--concurrency 1 8", "--max-num-seqs 1 8"),
        ("profile", "--concurrency 8", "--max-num-seqs 8"),
        ("eval", "--batch-size 4", "--max-num-seqs 4"),
        ("eval", "--max-length 99", "--max-model-len 99"),
        ("eval", "--max-gen-toks 9", "--max-tokens 9"),
        ("generate", "--adaptive", "-k auto"),
    ],
)
def test_names_of_the_last_version_mean_the_new_ones(verb: str, old: str, new: str) -> None:
    assert verb_parser(verb).parse(old.split()) == verb_parser(verb).parse(new.split())


def test_k_of_the_drafter_itself() -> None:
    assert (
        engine_config(verb_parser("generate").parse(["x", "--no-adaptive"])).num_draft_tokens
        is None
    )


@pytest.mark.parametrize("verb", ["generate", "eval", "bench", "profile", "train"])
def test_a_quantity_has_one_name(verb: str) -> None:
    """Catches `--batch-size` here and `--concurrency` there."""
    parsed = vars(verb_parser(verb).parse(["--max-num-seqs", "3", "--kv-memory", "1.5M"]))
    assert parsed["max_num_seqs"] in (3, [3])
    assert parsed.get("memory_bytes", parsed.get("kv_memory")) == 3 * 2**19


EVERY_OPTION = """
    --model m --drafter none --device cpu --dtype bfloat16 --attention torch_ref --block-size 32
    --kv-dtype fp8 --prefill-dtype model --weights bfloat16 --generation-config none
    --chat-template {{x}} --chat-template-kwargs {"x":1}
    --max-num-seqs 3 --max-model-len 99 --max-prefill-tokens 64 -k 0 --tree 0 --budget 2
    --draft-sampling probabilistic --pipeline-depth 1 --no-graphs --timing --kv-memory 2M
    --no-prefix-caching
    --max-tokens 9 --temperature 0.7 --top-k 5 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.2
    --seed 4 --stop a --stop b --stop-token-ids 7 --ignore-eos --logprobs --top-logprobs 2
    --prompt-logprobs 1 --min-tokens 3 --presence-penalty 0.5 --frequency-penalty 0.6
    --cache-salt s --no-read-prefix-cache --no-skip-special-tokens
    --thinking-token-budget 6 --grammar-after-thinking
"""


def test_options_reach_the_api(monkeypatch: Patch) -> None:
    """Catches an option that is declared and then forgotten: one of every field, none at its
    default.
    """
    line = ["generate", "x", *EVERY_OPTION.split(), "--prediction", __file__]
    parsed = verb_parser("generate").parse(line[1:])
    for config, made in (
        (SamplingParams, sampling_params(parsed)),
        (EngineConfig, engine_config(parsed)),
    ):
        default = config()
        same = {
            one.name
            for one in fields(config)
            if getattr(made, one.name) == getattr(default, one.name)
        }
        elsewhere = (
            {"num_draft_tokens", "tree_nodes", "store"} if config is SamplingParams else set()
        )
        assert same <= {"seed", "logit_bias", "grammar"} | elsewhere, (
            f"{config.__name__} has fields without an option: {same}"
        )
    assert sampling_params(parsed) == SamplingParams(
        *(9, 0.7, 5, 0.9, 0.1, 1.2, 4, ("a", "b"), (7,), True, True),
        top_logprobs=2,
        prompt_logprobs=1,
        min_tokens=3,
        presence_penalty=0.5,
        frequency_penalty=0.6,
        cache_salt="s",
        read_prefix_cache=False,
        skip_special_tokens=False,
        thinking_token_budget=6,
        grammar_after_thinking=True,
        prediction=Path(__file__).read_text(),
    )
    asked = loaded(monkeypatch, *line)
    assert asked.pop("engine") == EngineConfig(
        3, 99, 64, 0, "probabilistic", 1, False, True, None, CacheConfig(2 * 2**20, False), 0, 2.0
    )
    assert (asked.pop("target"), asked.pop("drafter")) == ("m", "none")
    assert LoadConfig(**asked) == LoadConfig(
        "cpu",
        "bfloat16",
        "torch_ref",
        32,
        "fp8",
        "model",
        "bfloat16",
        None,
        "none",
        "{{x}}",
        '{"x": 1}',
    )


def test_grammar(tmp_path: Path) -> None:
    """Of every kind, also from a file; what is wrong with one is said."""
    parse = verb_parser("generate").parse
    (tmp_path / "schema.json").write_text('{"type": "null"}')
    asked = {
        "json_object": Grammar.json_object(),
        'json_object:{"type": "null"}': Grammar.json_schema({"type": "null"}),
        'json:{"type": "null"}': Grammar.json_schema({"type": "null"}),
        'grammar:root ::= "a"': Grammar.ebnf('root ::= "a"'),
        f"json_schema:@{tmp_path / 'schema.json'}": Grammar.json_schema({"type": "null"}),
        "regex:a:b|c": Grammar.regex("a:b|c"),
        "choice:a:b|c": Grammar.choice(["a:b", "c"]),
        'ebnf:root ::= "a"': Grammar.ebnf('root ::= "a"'),
    }
    for option, grammar in asked.items():
        assert sampling_params(parse(["x", "--grammar", option])) == SamplingParams(grammar=grammar)
    for option, message in {
        "xml:a": "choose one of json_schema",
        f"regex:@{tmp_path / 'none'}": "cannot be read",
    }.items():
        with pytest.raises(SpecDecError, match=message):
            sampling_params(parse(["x", "--grammar", option]))


def test_defaults_are_those_of_the_api(monkeypatch: Patch) -> None:
    asked = loaded(monkeypatch, "generate", "x")
    assert asked.pop("engine") == EngineConfig()
    assert (asked.pop("target"), asked.pop("drafter")) == ("embedded", "auto")
    assert LoadConfig(**asked) == LoadConfig()
    assert sampling_params(verb_parser("generate").parse(["x"])) == SamplingParams()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512M", 512 * 2**20),
        ("2G", 2**31),
        ("2gib", 2**31),
        ("1.5k", 1536),
        ("1T", 2**40),
        ("77", 77),
        ("8B", 8),
    ],
)
def test_sizes_are_binary(text: str, size: int) -> None:
    assert byte_size(text) == size


def test_a_config_file_may_write_sizes_too(tmp_path: Any) -> None:
    file = tmp_path / "run.toml"
    file.write_text('out = "run"\nkv-memory = "512M"\n')
    assert build_config({}, str(file)) == TrainConfig(out="run", kv_memory=512 * 2**20)
    file.write_text('out = "run"\nkv-memory = "much"\n')
    with pytest.raises(InvalidInputError, match=r"run.toml: kv_memory: 'much' is not a size"):
        build_config({}, str(file))


def test_which_gpu_or_why_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line on standard error with every command that decodes; none where a CPU is all there is,
    or what was asked for.
    """

    def said(name: str, *, seen: bool, reason: str | None = None) -> str:
        monkeypatch.setattr(
            device, "resolve_device", lambda name: torch.device("cuda" if seen else "cpu")
        )
        monkeypatch.setattr(device, "unseen_gpu", lambda: reason)
        say_gpu(name)
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    monkeypatch.setattr(
        device, "describe_device", lambda where: f"{where}, AMD Instinct MI300X, ROCm gfx942"
    )
    assert said("auto", seen=True) == "specdec: on cuda, AMD Instinct MI300X, ROCm gfx942\n"
    assert (
        said("auto", seen=False, reason="an AMD GPU is here, but")
        == "specdec: no GPU is used: an AMD GPU is here, but\n"
    )
    assert (
        said("cpu", seen=False, reason="an AMD GPU is here, but") == said("auto", seen=False) == ""
    )


def test_loading_says_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "unseen_gpu", lambda: "hidden")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(SpecDecoder, "from_pretrained", lambda *args, **options: None)
    load_decoder(argparse.Namespace(model="embedded", device="auto"), None, EngineConfig())
    assert capsys.readouterr().err == "specdec: no GPU is used: hidden\n"
