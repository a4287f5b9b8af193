"""Codes of weights turned into numbers in registers, in Triton.

Codes come in words of 16 bits, two or four each. Every code is exact in half precision. NVIDIA's integer conversions are slow, so
there a code's bits are placed where those of a half-precision number belong, in two words at once. What that leaves to do is one
multiplication and addition:

    e4m3, e2m1   fields are moved to their places; a power of two corrects the exponent's offset, which is exact
    int4         128 in bfloat16 (1024 in float16) with the code in its last bits is their sum, from which 128 is taken
    int8         the same with the low 7 bits, and what the sign bit counts is taken too
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _assembly(code: str, brain: bool, middle: int) -> str:
    """PTX that makes of two words in one register a register of two numbers for each of their codes, the lowest code first.

    Numbers are bfloat16, or else float16. All instructions work on both halves of a register.
    """

    def field(shift: int, sign: int) -> str:
        """The field's bits, once shifted right, and the sign, once shifted left, in s."""
        move = f"shr.u32 s, w, {shift}; " if shift > 0 else f"shl.b32 s, w, {-shift}; "
        place = f"shl.b32 t, w, {sign}; and.b32 t, t, 0x80008000; " if sign else "and.b32 t, w, 0x80008000; "
        return f"{move}{place}lop3.b32 s, s, {mask}, t, 0xEA; "

    count = 2 if code in ("e4m3", "int8") else 4
    base, one = (0x4300, 0x3F80) if brain else (0x6400, 0x3C00)  # 128 or 1024, and 1
    if code == "e4m3":
        power = 0x7B80 if brain else 0x5C00  # 2^120, or 2^8
        mask, low, high = ("0x07F007F0", -4, 4) if brain else ("0x3F803F80", -7, 1)
        steps = [field(low, 8), field(high, 0)]
        factor, summand = power, 0x8000
    elif code == "e2m1":
        power = 0x7E80 if brain else 0x7400  # 2^126, or 2^14
        mask, first = ("0x01C001C0", -6) if brain else ("0x0E000E00", -9)
        steps = [field(first + 4 * i, 12 - 4 * i) for i in range(4)]
        factor, summand = power, 0x8000
    elif code == "int4":
        moves = ["mov.b32 s, w; ", *(f"shr.u32 s, w, {shift}; " for shift in (4, 8, 12))]
        steps = [move + "lop3.b32 s, s, 0x000F000F, o, 0xEA; " for move in moves]
        factor, summand = one, base + 0x8000 + middle
    elif brain:  # the sign bit's place in -128 makes it -256
        signed = "and.b32 t, s, 0x00800080; lop3.b32 s, s, 0x007F007F, o, 0xEA; or.b32 z, t, 0xC300C300; "
        steps = ["mov.b32 s, w; " + signed, "shr.u32 s, w, 8; " + signed]
        factor, summand = one, 0x8000
    else:
        flipped = "lop3.b32 s, s, 0x00FF00FF, o, 0xEA; xor.b32 s, s, 0x00800080; "
        steps = ["mov.b32 s, w; " + flipped, "shr.u32 s, w, 8; " + flipped]
        factor, summand = one, base + 0x8000 + 128
    text = f"{{ .reg .b32 w, s, t, o, k, z; mov.b32 w, ${count}; mov.b32 o, {base * 0x10001:#x}; "
    text += f"mov.b32 k, {factor * 0x10001:#x}; mov.b32 z, {summand * 0x10001:#x}; "
    for output, step in enumerate(steps):
        text += f"{step}fma.rn.{'bf16x2' if brain else 'f16x2'} ${output}, s, k, z; "
    return text + "}"


@triton.jit
def numbers_of(words: tl.tensor, CODE: tl.constexpr, MIDDLE: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr) -> tl.tuple:
    """A tile of words, uint16, as a tile of numbers for each code of a word, the lowest first, less MIDDLE, which is int4's.

    ASSEMBLY is NVIDIA's, and makes half precision alone.
    """
    if ASSEMBLY:
        text: tl.constexpr = _assembly(CODE, tl.bfloat16 == DTYPE, MIDDLE)
        if CODE == "e4m3" or CODE == "int8":
            if tl.bfloat16 == DTYPE:
                tiles = tl.inline_asm_elementwise(text, "=r,=r,r", [words], (tl.bfloat16, tl.bfloat16), True, 2)
            else:
                tiles = tl.inline_asm_elementwise(text, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
        elif tl.bfloat16 == DTYPE:
            tiles = tl.inline_asm_elementwise(
                text, "=r,=r,=r,=r,r", [words], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2
            )
        else:
            tiles = tl.inline_asm_elementwise(
                text, "=r,=r,=r,=r,r", [words], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
            )
        return tiles
    else:
        wide = words.to(tl.uint32)
        if CODE == "e4m3" or CODE == "int8":
            return _number(wide & 255, CODE, MIDDLE).to(DTYPE), _number(wide >> 8, CODE, MIDDLE).to(DTYPE)
        else:
            return (
                _number(wide & 15, CODE, MIDDLE).to(DTYPE),
                _number((wide >> 4) & 15, CODE, MIDDLE).to(DTYPE),
                _number((wide >> 8) & 15, CODE, MIDDLE).to(DTYPE),
                _number(wide >> 12, CODE, MIDDLE).to(DTYPE),
            )


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
    else:
        return code.to(tl.float32) - MIDDLE
