"""Codes of weights turned into numbers in registers, in Triton.

Codes come in words of 16 bits, two or four each. Every code is exact in half precision. NVIDIA's
integer conversions are slow, so there a code's bits are placed where those of a half-precision
number belong, in two words at once. What that leaves to do is one multiplication and addition:

    e4m3, e2m1   fields are moved to their places; a power of two, which is exact, corrects the
                 exponent's offset
    int4         128 in bfloat16 (1024 in float16) with the code in its last bits is their sum, from
                 which 128 is taken
    int5, int6   the same, with the bits above the fourth from a register beside each word
    int8         the same with the low 7 bits, and what the sign bit counts is taken too
    nl4          bytes chosen from a table are read as int8
"""

import triton
import triton.language as tl

from specdec.layers.packed.weight import NL4

_TABLE = tuple(
    int.from_bytes(value & 255 for value in reversed(NL4[i : i + 4])) for i in range(0, 16, 4)
)
"""`NL4` in registers of four bytes."""


@triton.constexpr_function
def codes_of_word(code: str) -> int:
    """Codes in 16 bits."""
    return 2 if code in ("e4m3", "int8") else 4


@triton.constexpr_function
def high_bits(code: str) -> int:
    """Bits of a code that are not in its word."""
    return {"int5": 1, "int6": 2}.get(code, 0)


@triton.constexpr_function
def _assembly(code: str, brain: bool, middle: int) -> str:
    """PTX that makes of two words in one register a register of two numbers for each of their
    codes, the lowest code first.

    The high bits of either word, if there are any, come in a register of their own. Numbers are
    bfloat16, or else float16. All instructions work on both halves of a register.
    """

    def field(shift: int, sign: int) -> str:
        """The field's bits, once shifted right, and the sign, once shifted left, in s."""
        place = (
            f"shl.b32 t, w, {sign}; and.b32 t, t, 0x80008000; "
            if sign
            else "and.b32 t, w, 0x80008000; "
        )
        return f"{moved('s', 'w', shift)}{place}lop3.b32 s, s, {mask}, t, 0xEA; "

    def moved(target: str, source: str, shift: int) -> str:
        """Shifted right, or left where that is negative."""
        way = "shr.u32" if shift > 0 else "shl.b32"
        if shift == 0:
            return f"mov.b32 {target}, {source}; "
        return f"{way} {target}, {source}, {abs(shift)}; "

    count = 2 if code in ("e4m3", "int8") else 4
    high = {"int5": 1, "int6": 2}.get(code, 0)
    base, one = (0x4300, 0x3F80) if brain else (0x6400, 0x3C00)  # 128 or 1024, and 1
    factor, summand = one, base + 0x8000 + middle
    if brain:  # the sign bit's place in -128 makes it -256
        signed = "and.b32 t, s, 0x00800080; lop3.b32 s, s, 0x007F007F, o, 0xEA; "
        signed += "or.b32 z, t, 0xC300C300; "
    else:
        signed = "lop3.b32 s, s, 0x00FF00FF, o, 0xEA; xor.b32 s, s, 0x00800080; "
    before = ""
    if code == "e4m3":
        factor, summand = 0x7B80 if brain else 0x5C00, 0x8000  # 2^120, or 2^8
        mask, low, top = ("0x07F007F0", -4, 4) if brain else ("0x3F803F80", -7, 1)
        steps = [field(low, 8), field(top, 0)]
    elif code == "e2m1":
        factor, summand = 0x7E80 if brain else 0x7400, 0x8000  # 2^126, or 2^14
        mask, first = ("0x01C001C0", -6) if brain else ("0x0E000E00", -9)
        steps = [field(first + 4 * i, 12 - 4 * i) for i in range(4)]
    elif code == "int8":
        factor, summand = one, 0x8000 if brain else base + 0x8000 + 128
        steps = [moved("s", "w", shift) + signed for shift in (0, 8)]
    elif code == "nl4":  # a permutation takes a byte of eight for each of a word's codes
        summand = 0x8000 if brain else base + 0x8000 + 128
        for word, target in ((0, "u"), (16, "v")):
            before += moved("s", "w", word) + "and.b32 t, s, 0x7777; "
            before += f"prmt.b32 {target}, {_TABLE[0]:#x}, {_TABLE[1]:#x}, t; "
            before += f"prmt.b32 t, {_TABLE[2]:#x}, {_TABLE[3]:#x}, t; "
            before += "shr.u32 s, s, 1; and.b32 s, s, 0x4444; or.b32 s, s, 0x3210; "
            before += f"prmt.b32 {target}, {target}, t, s; "
        steps = [f"prmt.b32 s, u, v, {0x0400 + 0x0101 * i:#x}; " + signed for i in range(4)]
    else:
        steps = [moved("s", "w", 4 * i) + "lop3.b32 s, s, 0x000F000F, o, 0xEA; " for i in range(4)]
        if high:
            bits = "0x00100010" if high == 1 else "0x00300030"
            for i in range(4):
                steps[i] += moved("t", "u", high * i - 4) + f"lop3.b32 s, t, {bits}, s, 0xEA; "
    text = f"{{ .reg .b32 w, s, t, u, v, o, k, z; mov.b32 o, {base * 0x10001:#x}; "
    text += f"mov.b32 k, {factor * 0x10001:#x}; mov.b32 z, {summand * 0x10001:#x}; "
    text += f"mov.b32 w, ${count}; {before}"
    if high:  # the lowest halves of two registers
        text += f"prmt.b32 u, ${count + 1}, ${count + 2}, 0x5410; "
    for output, step in enumerate(steps):
        text += f"{step}fma.rn.{'bf16x2' if brain else 'f16x2'} ${output}, s, k, z; "
    return text + "}"


@triton.constexpr_function
def _constraints(code: str) -> str:
    """Registers of `_assembly`: outputs, then inputs."""
    outputs, inputs = 2 if code in ("e4m3", "int8") else 4, 3 if code in ("int5", "int6") else 1
    return ",".join(["=r"] * outputs + ["r"] * inputs)


@triton.jit
def numbers_of(
    words: tl.tensor,
    high: tl.tensor,
    CODE: tl.constexpr,
    MIDDLE: tl.constexpr,
    DTYPE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> tl.tuple:
    """A tile of words, uint16, as a tile of numbers for each code of a word, the lowest first.

    MIDDLE is taken from integers.
    Codes of 5 and 6 bits have a tile, uint32, of what is above: one or two bits for each code of a
    word, the first one's the lowest. Others have None. ASSEMBLY is NVIDIA's, and makes half
    precision alone.
    """
    if ASSEMBLY:
        text: tl.constexpr = _assembly(CODE, tl.bfloat16 == DTYPE, MIDDLE)
        wanted: tl.constexpr = _constraints(CODE)
        operands = (words,) if high is None else (words, high)
        if codes_of_word(CODE) == 2 and tl.bfloat16 == DTYPE:
            return tl.inline_asm_elementwise(
                text, wanted, operands, (tl.bfloat16, tl.bfloat16), True, 2
            )  # fmt: skip
        elif codes_of_word(CODE) == 2:
            return tl.inline_asm_elementwise(
                text, wanted, operands, (tl.float16, tl.float16), True, 2
            )  # fmt: skip
        elif tl.bfloat16 == DTYPE:
            return tl.inline_asm_elementwise(
                text,
                wanted,
                operands,
                (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                True,
                2,
            )
        else:
            return tl.inline_asm_elementwise(
                text, wanted, operands, (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
            )  # fmt: skip
    else:
        wide = words.to(tl.uint32)
        if CODE == "e4m3" or CODE == "int8":
            return _number(wide & 255, CODE, MIDDLE).to(DTYPE), _number(wide >> 8, CODE, MIDDLE).to(
                DTYPE
            )
        else:
            above = wide if high is None else high << 4
            return (
                _number(wide & 15 | _above(above, 0, CODE), CODE, MIDDLE).to(DTYPE),
                _number((wide >> 4) & 15 | _above(above, 1, CODE), CODE, MIDDLE).to(DTYPE),
                _number((wide >> 8) & 15 | _above(above, 2, CODE), CODE, MIDDLE).to(DTYPE),
                _number(wide >> 12 | _above(above, 3, CODE), CODE, MIDDLE).to(DTYPE),
            )


@triton.jit
def _above(high: tl.tensor, PLACE: tl.constexpr, CODE: tl.constexpr) -> tl.tensor:
    """What high bits, four further up, add to a code."""
    if CODE == "int5":
        return (high >> PLACE) & 16
    elif CODE == "int6":
        return (high >> (2 * PLACE)) & 48
    else:
        return tl.zeros_like(high)


@triton.jit
def _number(code: tl.tensor, CODE: tl.constexpr, MIDDLE: tl.constexpr) -> tl.tensor:
    """Codes, uint32, as float32."""
    if CODE == "e4m3":
        number = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        return number.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    elif CODE == "e2m1":
        number = ((code & 8) << 28) | ((code & 7) << 22)
        return number.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    elif CODE == "int8":
        return (code ^ 128).to(tl.float32) - 128.0
    elif CODE == "nl4":
        FIRST: tl.constexpr = _table(0)
        SECOND: tl.constexpr = _table(1)
        THIRD: tl.constexpr = _table(2)
        FOURTH: tl.constexpr = _table(3)
        low = tl.where(code & 4 == 0, tl.full(code.shape, FIRST, tl.uint32), SECOND)
        top = tl.where(code & 4 == 0, tl.full(code.shape, THIRD, tl.uint32), FOURTH)
        value = tl.where(code & 8 == 0, low, top) >> ((code & 3) * 8) & 255
        return (value ^ 128).to(tl.float32) - 128.0
    else:
        return code.to(tl.float32) - MIDDLE


@triton.constexpr_function
def _table(register: int) -> int:
    return _TABLE[register]


@triton.jit
def beside(units: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """High bits of four words each [n, m] as those of each word [n, 4 * m], below anything else."""
    COUNT: tl.constexpr = 4 * units.shape[1]
    spread = tl.broadcast_to(units.to(tl.uint32)[:, :, None], [units.shape[0], units.shape[1], 4])
    places = tl.arange(0, COUNT) % 4
    return tl.reshape(spread, [units.shape[0], COUNT]) >> (places * (4 * BITS))[None, :]


@triton.jit
def signed_byte(word: tl.tensor, PLACE: tl.constexpr) -> tl.tensor:
    """One of the four signed bytes of a word, int32, as float32: in the last bits of 2^23."""
    byte = ((word >> (8 * PLACE)) & 255) ^ (0x4B000000 + 128)
    return byte.to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def outer_of(words: tl.tensor, SECOND: tl.constexpr) -> tl.tensor:
    """Scales of scales as float32, from float16 or from two of them in a word, int32."""
    if words.dtype == tl.float16:
        return words.to(tl.float32)
    else:
        half = words >> 16 if SECOND else words
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_at(
    scale: tl.tensor,
    outer: tl.tensor,
    group: tl.tensor,
    GROUP: tl.constexpr,
    SECOND: tl.constexpr,
) -> tl.tensor:
    """The scale of a group, or with SECOND its minimum, as float32.

    Args:
        scale: addresses of the first ones of some columns; with `outer` of four in a word.
        outer: addresses of the columns' first scales of scales, or None.
        group: numbers of groups.
    """
    if outer is None:
        return tl.load(scale + group).to(tl.float32)
    else:
        word = tl.load(scale + group // 4) >> (group % 4 * 8)
        return signed_byte(word, 0) * outer_of(tl.load(outer + group * GROUP // 256), SECOND)
