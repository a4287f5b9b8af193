"""What is known of AMD's GPUs without one, as the tables of the docs.

python -m tests.checks.amd_tables                      prints all; the last one compiles for long
python -m tests.checks.amd_tables --only auto cards    prints some
python -m tests.checks.amd_tables --write              puts them into their pages

auto      what `auto` takes beside each AITER, with every self-check passed
cards     what runs where, card by card
compile   our kernels on every card, with the Triton that is installed; it needs no GPU
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.helpers.amd_cards import AITER, CARDS, row

DOCS = Path(__file__).parents[2] / "docs"


def auto() -> str:
    """Architectures by versions of AITER.

    A cell has ordinary heads, then latent attention without and with an indexer where they differ.
    """
    with TemporaryDirectory() as folder:
        rows = {name: list(row(Path(folder), name).values()) for name in CARDS}
    lines = [[f"{CARDS[name]} ({name})", *map(_cell, cells)] for name, cells in rows.items()]
    return table(["card", *AITER.values()], lines)


def cards() -> str:
    """Card by card: what is taken alone, and what the newest AITER adds."""
    from specdec.kernels.triton_launch import AMD_SHARED_MEMORY
    from specdec.layers.experts import router
    from tests.helpers.compiled_kernels import AMD_TARGETS

    newest = list(AITER)[-2]
    lines = []
    with TemporaryDirectory() as folder:
        for name, card in CARDS.items():
            found = row(Path(folder), name)
            choosing = "AITER's" if name in router.ARCHITECTURES else "ours"
            eight = "yes" if AMD_TARGETS[name].eight_bits else "no"
            memory = f"{AMD_SHARED_MEMORY.get(name, 64 * 1024) // 1024} KiB"
            taken = _cell(found[None]), _cell(found[newest]), choosing
            lines.append([f"{card} ({name})", *taken, eight, memory, "never"])
    titles = ["card", "alone", f"with AITER {newest}", "choice of experts with it"]
    return table([*titles, "8-bit numbers", "memory of a program", "run"], lines)


def compiled(targets: Sequence[str] = tuple(CARDS)) -> str:
    """Target by target: how many kernels, the registers of the largest, and what spills."""
    from tests.helpers.compiled_kernels import AMD_TARGETS, kernels, use_of

    lines = []
    for name in targets:
        uses = {title: use_of(one) for title, one in kernels(AMD_TARGETS[name], every_shape=False)}
        most = max(use.registers for use in uses.values())
        memory = max(use.shared for use in uses.values()) // 1024
        spilling = sorted((-use.spilled, title) for title, use in uses.items() if use.spilled)
        worst = f"{spilling[0][1]}: {-spilling[0][0]}" if spilling else ""
        counts = f"{len(uses)}", f"{most}", f"{memory} KiB", f"{len(spilling)}"
        lines.append([f"{CARDS[name]} ({name})", *counts, worst])
        print(f"{name}: {len(uses)} kernels", file=sys.stderr, flush=True)
    titles = ["card", "kernels", "most registers", "most memory", "spill", "registers spilled most"]
    return table(titles, lines)


def compile_section() -> str:
    """The name of the compile table: one for each Triton."""
    import triton

    return f"compile, Triton {triton.__version__}"


PARTS: dict[str, tuple[Callable[..., str], str]] = {
    "auto": (auto, "rocm.md"),
    "cards": (cards, "hardware.md"),
    "compile": (compiled, "rocm-kernels.md"),
}
"""What makes each table, and the page that has it."""


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown.

    >>> print(table(["a", "b"], [["1", ""]]))
    | a | b |
    |---|---|
    | 1 | |
    """
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---|" * (len(titles) - 1)]
    lines += [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in rows]
    return "\n".join(lines)


def replaced(page: str, section: str, lines: str) -> str:
    """A page with another table between the marks of a section.

    Raises:
        ValueError: the page has no such marks.

    >>> print(replaced("<!-- amd_tables: a -->\\nold\\n<!-- end -->", "a", "new"))
    <!-- amd_tables: a -->
    new
    <!-- end -->
    """
    start = f"<!-- amd_tables: {section} -->"
    mark = re.compile(rf"({re.escape(start)}\n).*?(<!-- end -->)", re.DOTALL)
    if not mark.search(page):
        raise ValueError(f"no page has the line {start}")
    return mark.sub(lambda found: f"{found[1]}{lines}\n{found[2]}", page)


def _cell(names: Sequence[str]) -> str:
    """Ordinary heads, then latent attention.

    >>> _cell(["triton_fa", "torch_ref", "torch_ref"])
    '`triton_fa`; `torch_ref`'
    >>> _cell(["rocm_aiter_fa", "rocm_aiter_mla", "rocm_aiter_mla_sparse"])
    '`rocm_aiter_fa`; `rocm_aiter_mla`, `rocm_aiter_mla_sparse`'
    """
    ordinary, *latents = (f"`{name}`" for name in names)
    return f"{ordinary}; {', '.join(dict.fromkeys(latents))}"


def sections(parts: Sequence[str], targets: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Section, page and table of each part."""
    for part in parts:
        make, page = PARTS[part]
        if part == "compile":
            yield compile_section(), page, make(targets)
        else:
            yield part, page, make()


def main(argv: list[str] | None = None) -> int:
    """Prints or writes the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.checks.amd_tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--targets", nargs="+", choices=CARDS, default=list(CARDS), help="to compile for (all)"
    )
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(argv)
    for section, name, lines in sections(args.only, args.targets):
        print(f"{section}\n\n{lines}\n", flush=True)
        if args.write:
            page = DOCS / name
            page.write_text(replaced(page.read_text(encoding="utf-8"), section, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
