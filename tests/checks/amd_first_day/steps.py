"""What is run, in which order, and how long it may take."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

AITER = ("rocm_aiter_fa", "rocm_aiter_fa_shuffle")
BACKENDS = (*AITER, "triton_fa", "torch_ref")
DEVICELESS = ("pytest", "tests.checks.triton")
"""Commands that have no `--device`, and would not run without a GPU."""

_CPU = "--device cpu --dtype bfloat16"
_TARGET = "--model TINY --device cpu --dtype float32"
_DRAFTS = f"{_TARGET} --drafter ngram -k 2 --max-tokens 8"
_LATENCY = f"{_CPU} --prompts 24 --contexts 24 --requests 2 --repeats 1"


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: what `--only` and `--again` call it.
        title: what it shows.
        arguments: of `python -m`.
        minutes: after which it is ended.
        small: arguments that follow the others in a rehearsal; None where it cannot be rehearsed.
        environ: variables beside those of this process.
        gpus: that it takes.
    """

    name: str
    title: str
    arguments: tuple[str, ...]
    minutes: float = 60
    small: tuple[str, ...] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 1

    @property
    def figures(self) -> Path | None:
        """The JSON file that it leaves: what `--out` names, or the report in the folder that it
        names.
        """
        if "--out" not in self.arguments:
            return None
        path = Path(self.arguments[self.arguments.index("--out") + 1])
        return path if path.suffix else path / "report.json"


def all_steps(
    folder: Path,
    *,
    tiny: Path,
    data: str | None,
    limit: int,
    pair: tuple[str, str] | None = None,
) -> list[Step]:
    """Every step, what finds an error soonest first.

    Args:
        folder: where commands leave their figures.
        tiny: the checkpoint of a rehearsal.
        data: GSM8K's questions, a JSONL file; None fetches them where they are needed.
        limit: how many of them.
        pair: a real target and its drafter, to be measured, too.
    """

    def words(command: str) -> tuple[str, ...]:
        return tuple(
            word.replace("OUT/", f"{folder}/").replace("TINY", str(tiny))
            for word in shlex.split(command)
        )

    def made(
        name: str,
        title: str,
        command: str,
        small: str | None = None,
        **environ: str,
    ) -> Step:
        here = command if command.startswith(DEVICELESS) else f"{command} --device cuda"
        less = None if small is None else words(small)
        gpus = 2 if "--nproc-per-node 2" in command else 1
        return Step(name, title, words(here), small=less, environ=environ, gpus=gpus)

    questions = f"--data {shlex.quote(f'gsm8k={data}')}" if data else ""
    real = _real(*pair, questions) if pair else ()
    rows = (*_first_start(), *_kernels(), *_models(questions, limit), *_latencies(), *real)
    steps = [made(*row) for row in rows]
    triton = (
        "tests.checks.attention --attention rocm_aiter_fa --against OUT/outputs.pt --out"
        " OUT/tiers.json"
    )
    tiers = made(
        "tiers",
        "AITER's Triton kernels alone, beside its others",
        triton,
        f"{_CPU} --every 40 --longest 300",
        AITER_TRITON_ONLY="1",
    )
    place = next(index for index, step in enumerate(steps) if step.name == "kernels") + 1
    return [*steps[:place], tiers, *steps[place:]]


Row = tuple[str, str, str] | tuple[str, str, str, str | None]
"""Name, title, command, and what follows it in a rehearsal."""


def _first_start() -> Iterator[Row]:
    yield "doctor", "what this machine is", "specdec doctor", _CPU
    yield (
        "doctor-latent",
        "backends of latent attention",
        "specdec doctor --mla",
        f"{_CPU} --heads 16",
    )
    yield "self-check", "every kind of kernel once", "specdec doctor --run", _CPU
    for name in BACKENDS[:3]:
        command = f"specdec warmup --attention {name} --max-num-seqs 32 --max-model-len 4096"
        small = (
            f"--model TINY {_CPU} --max-model-len 64 --max-num-seqs 2 -k 1"
            if name in AITER
            else None
        )
        yield f"warmup-{name}", f"what {name} compiles, and how long that takes", command, small


def _kernels() -> Iterator[Row]:
    command = "tests.checks.attention --save OUT/outputs.pt --out OUT/kernels.json"
    yield (
        "kernels",
        "attention against float64, up to 96 requests and 70,000 tokens",
        command,
        f"{_CPU} --every 40 --longest 300 --attention {' '.join(AITER)}",
    )
    yield (
        "latent",
        "latent and sparse attention against float64",
        "tests.checks.amd_first_day.latent --out OUT/latent.json",
        "--device cpu --shapes tiny tiny-sparse",
    )
    yield (
        "triton-attention",
        "our Triton attention at real sizes",
        "tests.checks.triton --part attention",
    )
    yield "triton-fused", "our fused layers at real sizes", "tests.checks.triton --part fused", ""
    yield "tests", "the tests that need a GPU", "pytest -q -m 'gpu or rocm' tests"


def _models(questions: str, limit: int) -> Iterator[Row]:
    for name in BACKENDS:
        small = f"{_TARGET} --prompts 2 --tokens 4 --batches 2" if name in AITER else None
        yield (
            f"lossless-{name}",
            f"every token of the embedded model on {name}",
            f"tests.checks.lossless --attention {name}",
            small,
        )
    for name in (AITER[0], "triton_fa"):
        command = f"tests.checks.lossless --attention {name}"
        long, many = "--prompts 1 --length 1200 --batches 1", "--prompts 96 --batches 96"
        yield f"lossless-long-{name}", f"{name} behind 1,200 tokens", f"{command} {long}"
        yield f"lossless-96-{name}", f"{name} with 96 requests at once", f"{command} {many}"
    yield (
        "lossless-eager",
        f"the same on {AITER[0]}, launched operation by operation",
        (f"tests.checks.lossless --attention {AITER[0]} --no-graphs"),
    )
    for name in BACKENDS[:3]:
        command = f"tests.checks.step --attention {name} --out OUT/steps-{name}.json"
        small = "--device cpu --shapes tiny" if name == AITER[0] else None
        yield f"steps-{name}", f"whole steps of four shapes on {name}", command, small
    for count in (1, 8, 32, 256):
        command = (
            f"specdec bench --max-num-seqs {count} --drafter smollm2-dflash ngram -k 7 auto"
            f" --out OUT/bench-{count}.json"
        )
        command += f" --sets gsm8k {questions} --limit {max(64, 2 * count)}" if questions else ""
        small = f"{_DRAFTS} --sets bundled --limit 2 --repeats 1 --warmup 0" if count == 8 else None
        yield (
            f"bench-{count}",
            f"speed with and without DFlash drafts, {count} at once",
            command,
            small,
        )
    command = (
        f"specdec eval --tasks gsm8k {questions} --limit {limit} --max-num-seqs 32 --out OUT/gsm8k"
    )
    yield (
        "gsm8k",
        "accuracy with and without drafts",
        command,
        f"{_DRAFTS} --tasks bundled --limit 1",
    )

    yield (
        "memory",
        "free memory, and what a run takes",
        "tests.checks.amd_first_day.memory --out OUT/memory.json",
    )
    yield (
        "serve",
        "a server under load, beside its engine alone",
        "tests.checks.serve_speed --at-once 1 8 32 --repeats 2 -- --max-num-seqs 32",
    )
    yield (
        "two-gpus",
        "sums and tokens of two ranks",
        "torch.distributed.run --nproc-per-node 2 -m tests.checks.ranks",
    )


def _real(target: str, drafter: str, questions: str) -> Iterator[Row]:
    for count in (1, 8, 16, 32):
        command = (
            f"specdec bench --model {shlex.quote(target)} --drafter {shlex.quote(drafter)}"
            f" --max-num-seqs {count} --sets gsm8k {questions} --limit {max(64, 2 * count)}"
            f" --out OUT/real-{count}.json"
        )
        yield f"real-{count}", f"{target} with {drafter}, {count} at once", command


def _latencies() -> Iterator[Row]:
    command, short = (
        "tests.checks.latency --out OUT/NAME.json --shape",
        "--prompts 2048 --contexts 2048 16384",
    )
    for name, title, options, tiny in (
        (
            "layout-plain",
            "latency on the plain layout",
            f"llama --attention {AITER[0]} {short}",
            None,
        ),
        (
            "layout-shuffled",
            "latency on the shuffled layout",
            f"llama --attention {AITER[1]} {short}",
            None,
        ),
        (
            "prefill-8-bit",
            "time to the first token, in 8 bits where gfx950 has them",
            "deepseek --attention rocm_aiter_mla",
            "tiny",
        ),
        (
            "prefill-16-bit",
            "the same in 16 bits",
            "deepseek --attention rocm_aiter_mla --prefill-dtype model",
            "tiny",
        ),
        (
            "sparse",
            "latency of sparse attention",
            "deepseek-sparse --attention rocm_aiter_mla_sparse",
            "tiny-sparse",
        ),
    ):
        yield (
            name,
            title,
            f"{command} {options}".replace("NAME", name),
            f"{_LATENCY} --shape {tiny}" if tiny else None,
        )
