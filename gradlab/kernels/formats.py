"""Values of quantizers' codes: functions of an element, its block's number and a random number, and back.

NAME_code returns an element's code, int32. NAME_value returns the code's element times a scale, from its block's number
or its two. P and Q are constants of the `Form`, RANDOM says whether random numbers in [-2^15, 2^15) are drawn.
"""

from __future__ import annotations

import triton
import triton.language as tl

_WHOLE = tl.constexpr(1.5 * 2.0**23)  # float32 numbers of this size are whole
HALF = tl.constexpr(0.5 + 2.0**-17)  # makes a number in [-1/2, 1/2) of 2^16 places one in (0, 1)


@triton.jit
def nearest(x):
    """Round numbers below 2^22 to the nearest whole one, or the even one of two."""
    return (x + _WHOLE) - _WHOLE


@triton.jit
def place(value, number):
    """Divide by the block's number, where it is not zero."""
    return tl.div_rn(value, tl.where(number == 0.0, 1.0, number))


@triton.jit
def clamped(x, low, high):
    """Cut off at both ends; NaN stays."""
    x = tl.where(x < low, low, x)
    return tl.where(x > high, high, x)


@triton.jit
def integer_code(value, number, drawn, P: tl.constexpr, Q: tl.constexpr, RANDOM: tl.constexpr):
    """Code of the whole number P to Q nearest to value / number, from 0 where Q is 7; 0 for NaN."""
    x = clamped(place(value, number), P - 1.0, Q + 1.0)
    x = tl.floor(x + drawn.to(tl.float32) * 2.0**-16 + HALF) if RANDOM else nearest(x)
    x = clamped(x, P, Q) + (8.0 if Q == 7.0 else 0.0)
    return tl.where(x == x, x, 0.0).to(tl.int32)


@triton.jit
def integer_value(code, number, other, scale, P: tl.constexpr, Q: tl.constexpr):
    signed = code - 8 if Q == 7.0 else (code ^ 128) - 128
    return signed.to(tl.float32) * (number * scale)


@triton.jit
def minifloat_code(value, number, drawn, P: tl.constexpr, Q: tl.constexpr, RANDOM: tl.constexpr):
    """Code of E4M3's, E5M2's or E2M1's number, of P bits of mantissa and at most Q, nearest to value / number."""
    bias: tl.constexpr = 7 if P == 3 else 15 if P == 2 else 1
    x = place(value, number)
    if RANDOM:
        exponent = tl.maximum(((x.to(tl.int32, bitcast=True) >> 23) & 255) - P, 128 - bias - P)
        step = (exponent << 23).to(tl.float32, bitcast=True)
        x = tl.floor(tl.div_rn(x, step) + drawn.to(tl.float32) * 2.0**-16 + HALF) * step
    return nearest_minifloat(x, P, Q)


@triton.jit
def nearest_minifloat(x, P: tl.constexpr, Q: tl.constexpr):
    """Code of the nearest number of P bits of mantissa and at most Q."""
    bias: tl.constexpr = 7 if P == 3 else 15 if P == 2 else 1
    x = clamped(x, -Q, Q)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    shift: tl.constexpr = 23 - P
    rounded = (magnitude + (2 ** (shift - 1) - 1) + ((magnitude >> shift) & 1)) >> shift
    small = nearest(tl.abs(x) * 2.0 ** (bias + P - 1)).to(tl.int32)
    normal = magnitude >= ((128 - bias) << 23)
    code = tl.where(normal, rounded - ((127 - bias) << P), small)
    sign: tl.constexpr = 8 if P == 1 else 128
    return tl.where(x == x, code, sign - 1) | ((bits >> 31) & sign)


@triton.jit
def minifloat_value(code, number, other, scale, P: tl.constexpr, Q: tl.constexpr):
    """Value of a code with P bits of mantissa, times the block's number and a scale."""
    bias: tl.constexpr = 7 if P == 3 else 15 if P == 2 else 1
    sign: tl.constexpr = 8 if P == 1 else 128
    magnitude = code & (sign - 1)
    fine = magnitude.to(tl.float32) * 2.0 ** (1 - bias - P)
    wide = ((magnitude << (23 - P)) + ((127 - bias) << 23)).to(tl.float32, bitcast=True)
    x = tl.where(magnitude < 2**P, fine, wide)
    if P == 3:
        x = tl.where(magnitude == 127, float("nan"), x)
    if P == 2:
        x = tl.where(magnitude == 124, float("inf"), tl.where(magnitude > 124, float("nan"), x))
    return tl.where(code >= sign, -x, x) * (number * scale)


@triton.jit
def scale_code(magnitude, unit, Q: tl.constexpr, SCALES: tl.constexpr, UP: tl.constexpr):
    """Byte of the scale of a block of this largest magnitude, see `Form.scales`. UP: no scale is rounded down."""
    if SCALES > 0:
        code = ((magnitude * SCALES).to(tl.int32, bitcast=True) >> 23) & 255
    else:
        wanted = tl.div_rn(magnitude, Q * tl.where(unit == 0.0, 1.0, unit))
        wanted = tl.where(wanted > 448.0, 448.0, wanted)
        code = nearest_minifloat(wanted, 3, 448.0)
        if UP:
            code += (minifloat_value(code, 1.0, 1.0, 1.0, 3, 448.0) < wanted).to(tl.int32)
    return code


@triton.jit
def scale_value(code, unit, SCALES: tl.constexpr):
    """Scale of a block by its byte, the inverse of `scale_code`."""
    if SCALES > 0:
        exponent = code.to(tl.int32) << 23
        value = tl.where(exponent == 0, 1 << 22, exponent).to(tl.float32, bitcast=True)  # 2^-127
    else:
        value = minifloat_value(code.to(tl.int32), unit, unit, 1.0, 3, 448.0)
    return value


@triton.jit
def sign_code(value, number, drawn, P: tl.constexpr, Q: tl.constexpr, RANDOM: tl.constexpr):
    return (value < 0.0).to(tl.int32)


@triton.jit
def sign_value(code, number, other, scale, P: tl.constexpr, Q: tl.constexpr):
    factor = number * scale
    return tl.where(code == 1, -factor, factor)


one_bit_code = sign_code


@triton.jit
def one_bit_value(code, number, other, scale, P: tl.constexpr, Q: tl.constexpr):
    above, below = number * (scale * 0.5), other * (scale * 0.5)
    half = above - below
    return tl.where(code == 1, -half, half) + (above + below)


@triton.jit
def levels_code(value, number, drawn, P: tl.constexpr, Q: tl.constexpr, RANDOM: tl.constexpr):
    """Code of one of P levels beside zero, in steps of Q."""
    moved = place(value, tl.div_rn(number, P) * Q) + drawn.to(tl.float32) * 2.0**-16 + (0.5 + P / Q + 2.0**-17)
    moved = clamped(moved, 0.0, 2 * P // Q + 0.5)
    return tl.where(moved == moved, moved, 0.0).to(tl.int32)


@triton.jit
def levels_value(code, number, other, scale, P: tl.constexpr, Q: tl.constexpr):
    return (code.to(tl.float32) * Q - P) * (tl.div_rn(number, P) * scale)


@triton.jit
def halving_code(value, number, drawn, P: tl.constexpr, Q: tl.constexpr, RANDOM: tl.constexpr):
    """Code of zero or one of P powers of two up to 1, or of their negatives."""
    x = place(value, number)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    below = (bits >> 23) + (P - 127)  # how many of the powers are at most |x|
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    share = tl.where(below < 1, tl.abs(x) * 2.0 ** (P - 1), mantissa - 1.0)
    above = (share > drawn.to(tl.float32) * 2.0**-16 + HALF).to(tl.int32)
    level = tl.minimum(tl.maximum(below, 0) + above, P)
    return tl.where(x == x, tl.where(x < 0.0, P - level, P + level), P)


@triton.jit
def halving_value(code, number, other, scale, P: tl.constexpr, Q: tl.constexpr):
    level = tl.minimum(code, 2 * P) - P
    power = ((tl.abs(level) + (127 - P)) << 23).to(tl.float32, bitcast=True)
    return tl.where(level == 0, 0.0, tl.where(level < 0, -power, power)) * (number * scale)


@triton.jit
def natural_code(value, number, drawn, P: tl.constexpr, Q: tl.constexpr, RANDOM: tl.constexpr):
    """Exponent of the power of two above or below a value, and its sign in the ninth bit."""
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    moved = tl.minimum(bits + drawn * 2**7 + (2**22 + 2**6), 0x7F7FFFFF)
    return (tl.where(bits >= 0x7F800000, bits, moved) >> 23) | ((value < 0.0).to(tl.int32) << 8)


@triton.jit
def natural_value(code, number, other, scale, P: tl.constexpr, Q: tl.constexpr):
    """The number is the exponent, the code the sign."""
    return tl.where(code == 1, -scale, scale) * (number.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def whole_value(code, number, other, scale, P: tl.constexpr, Q: tl.constexpr):
    """The code, in which zero is P, times the number."""
    return (code.to(tl.float32) - P) * (number * scale)


ternary_code, ternary_value = levels_code, whole_value
