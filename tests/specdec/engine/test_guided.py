"""Outputs that follow a grammar: exact with drafts of every kind, eager and captured, under
pressure, and at a dead end.
"""

import json
import re
from threading import Event
from typing import Any

import pytest
import torch

pytest.importorskip("xgrammar")

from drafters.ngram import NGramDrafter
from specdec.base.blocks import BlockShape
from specdec.base.errors import InvalidInputError
from specdec.engine.capture.graphs import StepGraphs
from specdec.engine.guided import GuidedGraphs
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar
from specdec.grammar.rules import rules_of
from specdec.model.batch import DecodeBatch
from specdec.model.core import Drafter, DraftOutput
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from tests.helpers.engines import finish
from tests.helpers.guided import GRAMMARS, MAX_TOKENS, SAMPLINGS, GuidedCase, tokens
from tests.helpers.recorder import Recorder
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.scripted_trees import ScriptedTrees
from tests.helpers.tiny_models import random_dflash
from tests.helpers.trees import random_trees
from tests.helpers.waiting import HANG

K, NODES = 4, 9


@pytest.fixture(scope="module")
def case() -> GuidedCase:
    return GuidedCase()


def drafter(case: GuidedCase, name: str, sampling: str) -> Drafter:
    """Random weights; or drafts that are right but for some, in chains and in trees."""
    if name == "dflash":
        return random_dflash(case.verifier, block_size=K + 1)
    if name == "ngram":
        return NGramDrafter(max_draft_tokens=K)
    if name == "scripted":
        return ScriptedDrafter(case.outputs(sampling), K, [set(), {1}, {3}])
    return ScriptedTrees(case.outputs(sampling), random_trees(4, NODES))


def captured(engine: Any) -> Recorder:
    """Has the steps of an engine captured."""
    engine.runner.graphs = StepGraphs(
        recorder := Recorder(), engine.slots, engine.runner.step_table
    )
    engine.runner.guided_graphs = GuidedGraphs(recorder, engine.slots, engine.runner)
    return recorder


def test_plain_outputs_match(case: GuidedCase) -> None:
    """Whole outputs are of their form; those that the token limit cuts are left out, but there are
    few.
    """
    whole = 0
    for requests in case.plain.values():
        for request, grammar in zip(requests, GRAMMARS, strict=True):
            if grammar is None or request.finish_reason == "length":
                continue
            text, whole = case.text(request), whole + 1
            assert request.finish_reason == "stop" and request.grammar is None
            match grammar.kind:
                case "json_schema":
                    document = json.loads(text)
                    assert (
                        set(document) == {"id", "tags"}
                        and isinstance(document["id"], int)
                        and len(document["tags"]) <= 3
                    )
                case "regex":
                    assert re.fullmatch(grammar.text, text)
                case "choice":
                    assert text in json.loads(grammar.text)
                case "ebnf":
                    assert re.fullmatch(r"\(*[xyz]\)*", text) and text.count("(") == text.count(")")
    assert whole >= 6


def test_greedy_equals_a_loop_over_transformers(case: GuidedCase) -> None:
    """Of the strings that may still come, the model's own most likely next character, found without
    this library or xgrammar.
    """
    grammar = Grammar.choice(["yes", "yesterday", "no", "nothing at all"])
    choices: list[str] = json.loads(grammar.text)
    for prompt in case.prompts:
        expected: list[int] = []
        while not expected or expected[-1] not in case.verifier.eos_token_ids:
            so_far = case.tokenizer.decode(expected)
            after = {
                choice[len(so_far) : len(so_far) + 1]
                for choice in choices
                if choice.startswith(so_far)
            }
            allowed = [
                case.tokenizer.convert_tokens_to_ids(char) if char else case.tokenizer.eos_token_id
                for char in after
            ]
            with torch.inference_mode():
                logits = case.model(torch.tensor([[*prompt, *expected]])).logits[0, -1]
            expected.append(max(allowed, key=lambda token: float(logits[token])))
        engine = case.engine(random_dflash(case.verifier, block_size=K + 1))
        request = engine.add_request(prompt, SamplingParams(grammar=grammar))
        finish(engine)
        assert request.output_token_ids == expected


@pytest.mark.parametrize(
    ("name", "sampling", "depth", "capture"),
    [
        ("dflash", "greedy", 0, False),
        ("dflash", "filtered", 1, True),
        ("ngram", "sampled", 1, False),
        ("scripted", "greedy", 1, True),
        ("scripted", "sampled", 0, True),
        ("scripted", "filtered", 1, False),
        ("trees", "greedy", 1, True),
        ("trees", "sampled", 1, False),
        ("trees", "filtered", 0, True),
    ],
)
def test_drafts_change_nothing(
    case: GuidedCase, name: str, sampling: str, depth: int, capture: bool
) -> None:
    """The tokens of plain decoding, and their log-probabilities; a request without a grammar among
    them.
    """
    trees = {"tree_nodes": NODES} if name == "trees" else {}
    engine = case.engine(drafter(case, name, sampling), pipeline_depth=depth, **trees)
    recorder = captured(engine) if capture else None
    requests = case.run(engine, **SAMPLINGS[sampling])
    plain = case.plain[sampling]
    assert tokens(requests) == tokens(plain)
    assert [r.finish_reason for r in requests] == [r.finish_reason for r in plain]
    for request, other in zip(requests, plain, strict=True):
        assert request.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    if name in ("scripted", "trees"):
        assert sum(sum(request.num_accepted) for request in requests) > 20
    if recorder:
        assert recorder.num_replays > engine.timer.num_steps  # three for a step in parts


@pytest.mark.parametrize("capture", [False, True])
def test_refused_drafts_give_way(
    case: GuidedCase, monkeypatch: pytest.MonkeyPatch, capture: bool
) -> None:
    """A drafter whose every draft is refused, and the right token among its alternatives, is right
    all the same.
    """
    script = drafter(case, "scripted", "greedy")
    used = {token for row in tokens(case.plain["greedy"]) for token in row}
    wrong = min(set(range(3, case.verifier.vocab_size)) - used)
    bind = script.bind

    def bound(*args: Any, **options: Any) -> Any:
        made = bind(*args, **options)
        propose = made.propose

        def refused(batch: DecodeBatch) -> DraftOutput:
            right: torch.Tensor = propose(batch).token_ids
            return DraftOutput(
                torch.full_like(right, wrong),
                alternatives=torch.stack([right + 1, right, right], dim=2),
            )

        made.propose = refused  # type: ignore[method-assign]
        return made

    monkeypatch.setattr(script, "bind", bound)
    monkeypatch.setattr(script, "wrong_at", [set()])
    engine = case.engine(script)
    if capture:
        captured(engine)
    requests = case.run(engine)
    assert tokens(requests) == tokens(case.plain["greedy"])
    assert sum(sum(r.num_accepted) for r in requests if r.sampling.grammar) > 20
    assert not any(requests[2].num_accepted)  # nothing is refused without a grammar


def test_probabilistic_drafts(case: GuidedCase) -> None:
    """Drafts of another distribution, most of them outside the grammar:
    outputs are of their form.
    """
    engine = case.engine(
        random_dflash(case.verifier, block_size=K + 1), draft_sampling="probabilistic"
    )
    for grammar in (Grammar.regex("(ab|ba)+d"), Grammar.choice(["yes", "no"])):
        params = [
            SamplingParams(max_tokens=30, temperature=1.0, seed=seed, grammar=grammar)
            for seed in range(4)
        ]
        requests = [engine.add_request(case.prompts[0], one) for one in params]
        finish(engine)
        for request in requests:
            pattern = "(ab|ba)+d" if grammar.kind == "regex" else "yes|no"
            assert request.finish_reason == "length" or re.fullmatch(pattern, case.text(request))
        assert any(request.finish_reason == "stop" for request in requests)


def test_preemption_keeps_the_place(case: GuidedCase) -> None:
    engine = case.engine(drafter(case, "scripted", "sampled"), num_blocks=33)
    requests = case.run(engine, **SAMPLINGS["sampled"])
    assert engine.scheduler.num_preemptions > 0
    assert tokens(requests) == tokens(case.plain["sampled"])


def test_batches_without_a_grammar_are_one_graph(case: GuidedCase) -> None:
    """As long as a request follows a grammar its batch is launched in parts; before and after,
    steps are what they were.
    """
    engine = case.engine(
        random_dflash(case.verifier, block_size=K + 1), pipeline_depth=1, max_num_seqs=2
    )
    recorder = captured(engine)
    free = engine.add_request(case.prompts[2], SamplingParams(max_tokens=60, ignore_eos=True))
    counts: list[int] = []
    while engine.has_work:
        if len(free.output_token_ids) > 10 and not counts:
            counts.append(recorder.num_replays - engine.timer.num_steps)
            guided = engine.add_request(
                case.prompts[3], SamplingParams(grammar=Grammar.choice(["yesterday"]))
            )
        engine.step()
        if counts and len(counts) == 1 and guided.finish_reason:
            counts.append(recorder.num_replays - engine.timer.num_steps)
    counts.append(recorder.num_replays - engine.timer.num_steps)
    assert case.text(guided) == "yesterday"
    assert counts[0] == 0 and counts[1] == 2 * len(guided.num_emitted) > 0
    assert counts[2] == counts[1] and len(free.output_token_ids) == 60


def test_a_dead_end_is_an_error(case: GuidedCase) -> None:
    """No token of this vocabulary is a ~, so the grammar cannot go on behind some tokens; neighbors
    do.
    """
    for rules, known in (('root ::= "~"', 0), ('root ::= "abab" "~"', 4)):
        engine = case.engine(random_dflash(case.verifier, block_size=K + 1))
        others = case.add(engine)
        request = engine.add_request(case.prompts[0], SamplingParams(grammar=Grammar.ebnf(rules)))
        finish(engine)
        assert request.finish_reason == "error" and "grammar allows no token" in (
            request.error or ""
        )
        assert len(request.output_token_ids) <= known
        assert tokens(others) == tokens(case.plain["greedy"])


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (None, "the grammar of kind ebnf cannot be compiled: "),
        (RuntimeError(""), "cannot be compiled: RuntimeError"),
        (KeyError("a\nb"), "cannot be compiled: "),
        (MemoryError(), "takes too much memory to compile"),
        (RuntimeError("std::bad_alloc"), "takes too much memory to compile"),
        (RecursionError(), "nested too deeply"),
    ],
    ids=repr,
)
def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(
    case: GuidedCase, failure: Exception | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the library raises."""
    bad = Grammar.ebnf("root ::= missing") if failure is None else Grammar.choice(["it fails"])
    engine = case.engine(None)
    if failure is not None:
        engine.admission.grammars = GrammarCompiler(
            case.tokenizer, case.verifier.vocab_size, case.verifier.eos_token_ids
        )

        def fail(grammar: Grammar) -> str:
            if grammar == bad:
                raise failure
            return rules_of(grammar)

        monkeypatch.setattr("specdec.grammar.compiler.rules_of", fail)
    others = case.add(engine)
    request = engine.add_request(case.prompts[0], SamplingParams(grammar=bad))
    finish(engine)
    error = request.error or ""
    assert (
        request.finish_reason == "error"
        and request.bad_input
        and reason in error
        and "\n" not in error
    )
    assert tokens(others) == tokens(case.plain["greedy"])
    with pytest.raises(InvalidInputError, match=re.escape(reason)):
        engine.admission.wait_for_grammar(request.sampling)


def test_a_request_waits_outside_the_batch(
    case: GuidedCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others pass it while its grammar is compiled; it can be cancelled meanwhile; a step with
    nothing else to do soon ends.
    """
    go_on = Event()
    compilers = [
        GrammarCompiler(case.tokenizer, case.verifier.vocab_size, case.verifier.eos_token_ids)
        for _ in range(1)
    ]
    compile_now = compilers[0]._compile

    def slow(*about: Any) -> Any:
        assert go_on.wait(HANG)
        return compile_now(*about)

    monkeypatch.setattr(compilers[0], "_compile", slow)
    engine = case.engine(None, max_num_seqs=1)
    engine.admission.grammars = compilers[0]
    guided = [
        engine.add_request(case.prompts[3], SamplingParams(grammar=GRAMMARS[3])) for _ in range(2)
    ]
    free = engine.add_request(case.prompts[2], SamplingParams(max_tokens=5, ignore_eos=True))
    for _ in range(20):
        engine.step()
    assert (
        free.finish_reason == "length"
        and not any(request.output_token_ids for request in guided)
        and engine.has_work
    )
    engine.abort(guided[0])
    assert guided[0].grammar is None
    go_on.set()
    finish(engine)
    assert guided[1].output_token_ids == case.plain["greedy"][3].output_token_ids


def test_equal_grammars_are_compiled_once(case: GuidedCase) -> None:
    one, other = (case.grammars.start(Grammar.regex("a+")).compiled.result() for _ in range(2))
    assert one is other and one is not case.grammars.start(Grammar.regex("a*")).compiled.result()


def test_kept_are_the_latest(case: GuidedCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as there is room for them."""
    compiler = GrammarCompiler(
        case.tokenizer, case.verifier.vocab_size, case.verifier.eos_token_ids
    )
    first, second, third = (Grammar.choice([letter * 3]) for letter in "abc")
    one, two = compiler.compiled(first).result(), compiler.compiled(second).result()
    room = one.memory_size_bytes + two.memory_size_bytes + 4 * len(first.text + second.text)
    monkeypatch.setattr("specdec.grammar.compiler.CACHE_BYTES", room)
    assert compiler.compiled(first).result() is one and compiler.compiled(third).result()
    assert (
        compiler.compiled(first).result() is one and compiler.compiled(second).result() is not two
    )


def test_refusals(case: GuidedCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one line each, before the request is queued."""
    params = SamplingParams(grammar=Grammar.json_object())
    engine = case.engine(None)
    engine.admission.grammars = None
    with pytest.raises(InvalidInputError, match="GrammarCompiler"):
        engine.add_request([5], params)
    engine.admission.grammars = GrammarCompiler(case.tokenizer, case.verifier.vocab_size, ())
    with pytest.raises(InvalidInputError, match="end-of-sequence"):
        engine.add_request([5], params)
    monkeypatch.setattr("specdec.grammar.compiler.find_spec", lambda name: None)
    with pytest.raises(InvalidInputError, match=r"\[grammar\]"):
        engine.admission.check([5], params)
    with pytest.raises(InvalidInputError, match="ignore_eos"):
        SamplingParams(grammar=Grammar.json_object(), ignore_eos=True)
    with pytest.raises(InvalidInputError, match=r"Grammar\.json_schema"):
        SamplingParams(grammar="a+")  # type: ignore[arg-type]


def test_from_the_decoder(case: GuidedCase) -> None:
    """With block shapes chosen step by step, which learn from steps with a grammar apart from
    others.
    """
    decoder = SpecDecoder(
        case.verifier, case.tokenizer, random_dflash(case.verifier, block_size=K + 1)
    )
    result = decoder.generate(case.prompts[3], grammar=GRAMMARS[3], max_tokens=MAX_TOKENS)
    assert result.token_ids == case.plain["greedy"][3].output_token_ids and result.text in (
        "yes",
        "yesterday",
        "no",
    )
    engine = decoder.engine
    assert engine.planner.choice and engine.planner.guided_choice
    assert engine.planner.choice.choose(1) == BlockShape(0)  # nothing is known yet
    assert (
        decoder.plain().generate(case.prompts[3], grammar=GRAMMARS[3]).token_ids == result.token_ids
    )
