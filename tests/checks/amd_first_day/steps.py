"""What is run, in which order, and how long it may take."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

AITER = ("rocm_aiter_fa", "rocm_aiter_fa_shuffle")
BACKENDS = (*AITER, "triton_fa", "torch_ref")


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
        figures: the JSON file that it leaves.
    """

    name: str
    title: str
    arguments: tuple[str, ...]
    minutes: float
    small: tuple[str, ...] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    figures: Path | None = None


def all_steps(folder: Path, *, tiny: Path, data: str | None, limit: int) -> list[Step]:
    """Every step, what finds an error soonest first.

    Args:
        folder: where commands leave their figures.
        tiny: the checkpoint of a rehearsal.
        data: where GSM8K lies, as `specdec eval --data` takes it; None fetches it.
        limit: its questions.
    """
    return [*_first_start(tiny), *_kernels(folder), *_models(folder, tiny, data, limit), *_latencies(folder)]


def _first_start(tiny: Path) -> list[Step]:
    cpu = ("--device", "cpu", "--dtype", "bfloat16")
    warm = ("--model", str(tiny), *cpu, "--max-model-len", "64", "--max-num-seqs", "2", "-k", "1")
    return [
        Step("doctor", "what this machine is", ("specdec", "doctor"), 10, cpu),
        Step("doctor-latent", "backends of latent attention", ("specdec", "doctor", "--mla"), 10, cpu),
        Step("self-check", "every kind of kernel once", ("specdec", "doctor", "--run"), 60, cpu),
        *(
            Step(f"warmup-{name}", f"what {name} compiles, and how long that takes", ("specdec", "warmup", "--attention", name,
                 "--max-num-seqs", "32", "--max-model-len", "4096"), 120, warm if name in AITER else None)
            for name in (*AITER, "triton_fa")
        ),
    ]  # fmt: skip


def _kernels(folder: Path) -> list[Step]:
    check, outputs = "tests.checks.attention", str(folder / "outputs.pt")
    small = ("--device", "cpu", "--every", "13")
    return [
        Step("kernels", "attention against float64", (check, "--save", outputs, "--out", str(folder / "kernels.json")), 60,
             (*small, "--attention", *AITER), figures=folder / "kernels.json"),
        Step("tiers", "AITER's Triton kernels alone, against float64 and its other kernels", (check, "--attention",
             "rocm_aiter_fa", "--against", outputs, "--out", str(folder / "tiers.json")), 60, small,
             {"AITER_TRITON_ONLY": "1"}, folder / "tiers.json"),
        Step("triton-attention", "our Triton attention at real sizes", ("tests.checks.triton", "--part", "attention"), 60),
        Step("triton-fused", "our fused layers at real sizes", ("tests.checks.triton", "--part", "fused"), 60, ()),
        Step("tests", "the tests that need a GPU", ("pytest", "-q", "-m", "gpu or rocm", "tests"), 60),
    ]  # fmt: skip


def _models(folder: Path, tiny: Path, data: str | None, limit: int) -> list[Step]:
    target = ("--model", str(tiny), "--device", "cpu", "--dtype", "float32")
    few = (*target, "--drafter", "ngram", "-k", "2", "--max-tokens", "8", "--limit", "2")
    steps = [
        Step(f"lossless-{name}", f"every token of the embedded model on {name}", ("tests.checks.lossless", "--attention", name), 60,
             (*target, "--prompts", "2", "--tokens", "4", "--batches", "2") if name in AITER else None)
        for name in BACKENDS
    ]  # fmt: skip
    steps += [
        Step(f"steps-{name}", f"whole steps of four shapes on {name}", ("tests.checks.step", "--attention", name, "--out",
             str(folder / f"steps-{name}.json")), 60, ("--device", "cpu", "--shapes", "tiny") if name == AITER[0] else None,
             figures=folder / f"steps-{name}.json")
        for name in BACKENDS[:3]
    ]  # fmt: skip
    steps += [
        Step(f"bench-{count}", f"speed with and without DFlash drafts, {count} at once", ("specdec", "bench", "--max-num-seqs",
             str(count), "--drafter", "smollm2-dflash", "ngram", "-k", "7", "auto", "--out", str(folder / f"bench-{count}.json")),
             60, (*few, "--repeats", "1", "--warmup", "0") if count == 8 else None, figures=folder / f"bench-{count}.json")
        for count in (1, 8, 32, 256)
    ]  # fmt: skip
    own = ("--data", f"gsm8k={data}") if data else ()
    gsm8k = ("specdec", "eval", "--tasks", "gsm8k", *own, "--limit", str(limit), "--max-num-seqs", "32", "--out")
    report = folder / "gsm8k"
    steps.append(
        Step("gsm8k", "accuracy with and without drafts", (*gsm8k, str(report)), 120, (*few, "--tasks", "bundled", "--limit", "1"),
             figures=report / "report.json")
    )  # fmt: skip
    return steps


def _latencies(folder: Path) -> list[Step]:
    def step(name: str, title: str, shape: str, *options: str) -> Step:
        out = folder / f"{name}.json"
        tiny = {"deepseek": "tiny", "deepseek-sparse": "tiny-sparse"}.get(shape)
        small = (
            "--device",
            "cpu",
            "--dtype",
            "bfloat16",
            "--prompts",
            "24",
            "--contexts",
            "24",
            "--requests",
            "2",
            "--repeats",
            "1",
        )
        arguments = ("tests.checks.latency", "--shape", shape, *options, "--out", str(out))
        return Step(name, title, arguments, 60, (*small, "--shape", tiny) if tiny else None, figures=out)

    short = ("--prompts", "2048", "--contexts", "2048", "16384")
    mla, sparse = ("--attention", "rocm_aiter_mla"), ("--attention", "rocm_aiter_mla_sparse")
    return [
        step("layout-plain", "latency on the plain layout", "llama", "--attention", AITER[0], *short),
        step("layout-shuffled", "latency on the shuffled layout", "llama", "--attention", AITER[1], *short),
        step("prefill-8-bit", "time to the first token, prompts in 8 bits where gfx950 has them", "deepseek", *mla),
        step("prefill-16-bit", "the same in 16 bits", "deepseek", *mla, "--prefill-dtype", "model"),
        step("sparse", "decode latency of sparse attention", "deepseek-sparse", *sparse),
        step("dense", "the same over every position", "deepseek", *mla, "--prompts", "2048"),
    ]
