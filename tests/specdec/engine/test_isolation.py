"""What a request brings may raise wherever a step looks at requests one by one: that request ends,
and no other notices.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import pytest

pytest.importorskip("xgrammar")

from specdec.base.errors import InvalidInputError
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request
from specdec.grammar.grammar import Grammar
from specdec.sampling.params import SamplingParams
from specdec.session.session import Session
from tests.helpers.engines import finish
from tests.helpers.guided import SAMPLINGS, GuidedCase, tokens
from tests.specdec.engine.test_guided import captured, drafter

TEXTS = Grammar.choice(["yesterday", "tomorrow"])
OURS, THEIRS = RuntimeError("it broke"), InvalidInputError("it was asked wrongly")


@pytest.fixture(scope="module")
def case() -> GuidedCase:
    return GuidedCase()


def raising(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error

    return fail


class Fails(list[Any]):
    """Takes nothing."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.append = raising(error)  # type: ignore[method-assign]


def in_text(engine: SpecEngine, request: Request, error: Exception) -> None:
    request.on_tokens = raising(error)


def in_logprobs(engine: SpecEngine, request: Request, error: Exception) -> None:
    request.top_logprobs = Fails(error)


def in_prompt_logprobs(engine: SpecEngine, request: Request, error: Exception) -> None:
    request.prompt_logprobs = Fails(error)


def in_grammar(name: str) -> Callable[[SpecEngine, Request, Exception], None]:
    def inject(engine: SpecEngine, request: Request, error: Exception) -> None:
        assert request.grammar
        request.grammar.compiled.result()
        setattr(request.grammar, name, raising(error))

    return inject


def in_compiled(engine: SpecEngine, request: Request, error: Exception) -> None:
    assert request.grammar
    request.grammar.compiled = type(request.grammar.compiled)()
    request.grammar.compiled.set_exception(error)


def in_begin(engine: SpecEngine, request: Request, error: Exception) -> None:
    """The rows of a batch are written together."""
    begin = engine.slots.begin

    def begin_others(requests: Sequence[Request]) -> None:
        if request in requests:
            raise error
        begin(requests)

    engine.slots.begin = begin_others  # type: ignore[method-assign]


PLACES: dict[str, tuple[Any, dict[str, Any]]] = {
    "text": (in_text, {}),
    "log-probabilities": (in_logprobs, {"top_logprobs": 2}),
    "prompt log-probabilities": (in_prompt_logprobs, {"prompt_logprobs": 1}),
    "matching": (in_grammar("advance"), {"grammar": TEXTS}),
    "masks": (in_grammar("fill"), {"grammar": TEXTS}),
    "replaced drafts": (in_grammar("constrained"), {"grammar": TEXTS}),
    "compiling": (in_compiled, {"grammar": TEXTS}),
    "sampling parameters": (in_begin, {}),
}


@pytest.mark.parametrize(
    ("sampling", "name"),
    [(sampling, name) for sampling in SAMPLINGS for name in ("dflash", "trees")],
)
def test_requests_fail_alone(case: GuidedCase, sampling: str, name: str) -> None:
    """At every place by whosever fault, with others in flight; the last sampling's steps are
    captured.
    """
    engine = case.engine(drafter(case, name, sampling), max_num_seqs=9)
    if sampling == "filtered":
        captured(engine)
    others, bad = case.add(engine, **SAMPLINGS[sampling]), {}
    for place, (inject, asked) in PLACES.items():
        for error in (OURS, THEIRS):
            params = {"max_tokens": 30, **SAMPLINGS[sampling], **asked}
            bad[place, error] = request = engine.add_request(
                case.prompts[0], SamplingParams(seed=3, **params)
            )
            inject(engine, request, error)
    others += case.add(engine, **SAMPLINGS[sampling])
    finish(engine)
    for (place, error), request in bad.items():
        said = (
            "it was asked wrongly"
            if error is THEIRS
            else "the request failed in the engine: it broke"
        )
        expected: tuple[str, str | None, bool] = ("error", said, error is THEIRS)
        if place == "replaced drafts" and name == "trees":  # whose drafts stay as they are
            expected = ("stop", None, False)
        assert (request.finish_reason, request.error, request.bad_input) == expected, place
    assert tokens(others) == 2 * tokens(case.plain[sampling])
    assert engine.pool.num_used == 0 and len(engine.scheduler._free_slots) == 9


@pytest.mark.parametrize("error", [OURS, THEIRS], ids=str)
@pytest.mark.parametrize("when", ["take", "finish"])
def test_a_text_that_cannot_be_handed_over(case: GuidedCase, when: str, error: Exception) -> None:
    session = Session(case.engine(drafter(case, "dflash", "greedy")), case.tokenizer)
    bad, good = (session.submit(case.prompts[2], SamplingParams(max_tokens=20)) for _ in range(2))
    setattr(bad._text, when, raising(error))
    result = bad.result()
    assert (result.finish_reason, result.bad_input) == ("error", error is THEIRS) and result.error
    assert good.result().token_ids == case.plain["greedy"][2].output_token_ids[:20]
    assert session.idle and not session.engine.has_work and session.engine.pool.num_used == 0


def test_a_text_that_fails_is_cut_on_other_ranks() -> None:
    """They do not see the text."""
    from specdec.engine.lockstep import LeadingEngine

    engine = object.__new__(LeadingEngine)
    engine._cuts = {}
    request = Request(5, [1], SamplingParams(), seed=0, max_total_len=9, output_token_ids=[3])
    with pytest.raises(RuntimeError, match="broke"):
        engine._asked(raising(OURS), request, [1])
    assert engine._cuts == {(5, 1): 0}
