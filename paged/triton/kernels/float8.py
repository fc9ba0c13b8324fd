"""float8 e4m3 by bit operations: the type exists in hardware from sm_89 on, its bytes everywhere.

e4m3 is sign, 4 bits of exponent with bias 7 and 3 bits of mantissa; it has subnormals, no
infinities, and one NaN per sign. Source: arXiv:2209.05433.
"""

import triton
import triton.language as tl

# Exponents of float16 have bias 15: bits of e4m3 in their place stand for 2^8 times less.
E4M3_AS_FLOAT16: tl.constexpr = tl.constexpr(256.0)


@triton.jit
def e4m3_as_float16(code):
    """Return float16 values that are e4m3 codes (uint8) divided by `E4M3_AS_FLOAT16`; exact."""
    wide = code.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def e4m3_codes(x):
    """Return the e4m3 codes (uint8) nearest to float32 values, ties to even; 448 is the largest."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), 448.0)
    magnitude_bits = magnitude.to(tl.uint32, bitcast=True)
    # Round off 20 of 23 bits of mantissa, then change the bias of the exponent from 127 to 7.
    rounded = magnitude_bits + 0x7FFFF + ((magnitude_bits >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, which is what float32 resolves beside 2^14.
    subnormal = (magnitude + 16384.0).to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
