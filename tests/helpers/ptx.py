"""The few PTX instructions of our inline assembly, executed on tensors: a CPU's tests read what the
interpreter cannot run.
"""

import re
from collections.abc import Callable

import torch
from torch import Tensor


def run(
    text: str, register: Tensor, outputs: int, dtype: torch.dtype, *others: Tensor
) -> list[Tensor]:
    """What a piece of assembly makes of its inputs.

    Args:
        text: instructions for 32-bit registers; `$0` and on are outputs, the next ones are inputs.
        register: int32 [n], the first input.
        outputs: how many there are.
        dtype: of the two numbers that a register of `fma` holds.
        others: more inputs.

    Returns:
        Each output as numbers [n, 2], the lower half first.

    Raises:
        AssertionError: an instruction is not known, or reads what nothing has written.
    """
    held = {f"${outputs + place}": one for place, one in enumerate((register, *others))}

    def value(name: str) -> Tensor:
        if re.fullmatch(r"0x[0-9a-fA-F]+|\d+", name):
            number = int(name, 0)
            return torch.tensor(
                number - 2**32 if number >= 2**31 else number, dtype=torch.int32
            ).expand_as(register)
        return held[name]

    def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        first, second, third = (halves(x, dtype).double() for x in (a, b, c))
        return (first * second + third).to(dtype).view(torch.int32)[:, 0]

    operations: dict[str, Callable[..., Tensor]] = {
        "mov.b32": lambda a: a,
        "shr.u32": lambda a, n: (a.long() & 0xFFFFFFFF).bitwise_right_shift(n.long()).int(),
        "shl.b32": lambda a, n: a.bitwise_left_shift(n),
        "and.b32": torch.bitwise_and,
        "or.b32": torch.bitwise_or,
        "xor.b32": torch.bitwise_xor,
        "lop3.b32": _looked_up,
        "prmt.b32": _permuted,
        f"fma.rn.{'bf16x2' if dtype == torch.bfloat16 else 'f16x2'}": fused,
    }
    for line in text.strip("{} ").split(";"):
        name, _, rest = line.strip().partition(" ")
        if name in ("", ".reg"):
            continue
        target, *sources = (part.strip() for part in rest.split(","))
        assert name in operations, f"{name} is not known"
        held[target] = operations[name](*(value(source) for source in sources))
    return [halves(held[f"${number}"], dtype) for number in range(outputs)]


def halves(register: Tensor, dtype: torch.dtype) -> Tensor:
    """Registers [n] as the numbers [n, 2] in their halves, the lower one first."""
    return register[:, None].contiguous().view(dtype)


def _looked_up(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    """Any function of three bits, by its table: `lop3`."""
    result = torch.zeros_like(a)
    for index in range(8):
        if int(table[0]) >> index & 1:
            result |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return result


def _permuted(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    """Four bytes of eight, each chosen by three bits: `prmt`."""
    both = (b.long() << 32) | (a.long() & 0xFFFFFFFF)
    result = torch.zeros_like(both)
    for place in range(4):
        choice = selector.long() >> 4 * place & 15
        assert (choice < 8).all(), "no sign is asked for"
        result |= (both >> 8 * choice & 255) << 8 * place
    return torch.where(result >= 2**31, result - 2**32, result).int()
