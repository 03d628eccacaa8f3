"""Device functions that printed Triton kernels call, where the language has no function that is right everywhere.

Each is Triton source that works in the interpreter and compiled for CUDA and HIP (whose own maths libraries
the interpreter lacks). A kernel's text carries the ones it calls.
"""

import re

_ROUND_BF16 = '''
def round_bf16(x):
    """x rounded to bf16, as f32."""
    return x.to(tl.bfloat16).to(tl.float32)

def narrow_bf16(x):
    """x as bf16."""
    return x.to(tl.bfloat16)
'''

# Triton takes -x for 0 - x, which is 0 and not -0 for x = 0: numbers are multiplied by -1.
# The interpreter truncates where it converts to bf16, so there the bits are rounded by hand; nor can it multiply it.
_ROUND_BF16_BITS = '''
def round_bf16(x):
    """x rounded to bf16, as f32."""
    f = x.to(tl.float32)
    bits = f.to(tl.int32, bitcast=True)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(f != f, f, even.to(tl.float32, bitcast=True))

def narrow_bf16(x):
    """x rounded to bf16, as f32."""
    return round_bf16(x)
'''

_FUNCTIONS = '''
def add(a, b):
    """a + b, to reduce with."""
    return a + b

def max_or_nan(a, b):
    """The greater one, NaN if either is (tl.max drops NaN)."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

def min_or_nan(a, b):
    """The lesser one, NaN if either is (tl.min drops NaN)."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)

def product(a, b):
    """a b, to reduce with."""
    return a * b

def exp(x):
    """e^x: in f32 tl.exp is 2^t, off by what rounding takes from t = x log2 e. Here t is whole + little: no loss."""
    if x.dtype == tl.float64:
        r = tl.exp(x)
    else:
        whole = tl.floor(x * 1.4426950408889634 + 0.5)
        rest = (x - whole * 0.693145751953125) - whole * 1.428606765330187e-06
        part = tl.exp2(tl.where(tl.abs(x) < 128.0, rest * 1.4426950408889634, 0.0))
        r = tl.exp2(whole - 1.0) * (part + part)
    return r

def tanh(x):
    """tanh x in f32: a polynomial near 0, where 1 - 2/(1 + e^2|x|) cancels."""
    z = x * x
    near = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
    near = (near - 3.33332819422e-1) * z * x + x
    far = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * tl.abs(x)))
    return tl.where(x == 0.0, x, tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, far * -1.0, far)))

def expm1(x):
    """e^x - 1: the error of u = e^x cancels in (u - 1) / ln u, unless u is denormal."""
    u = exp(x)
    r = (u - 1.0) * (x / tl.log(u))
    r = tl.where(u < 1e-30, -1.0, tl.where(u == float("inf"), u, r))
    return tl.where(u == 1.0, x, r)

def tanh_f64(x):
    """tanh x in f64."""
    e = expm1(-2.0 * tl.abs(x))
    r = -e / (2.0 + e)
    return tl.where(x == 0.0, x, tl.where(x < 0, r * -1.0, r))

def log1p(x):
    """ln(1 + x): the error of u = 1 + x cancels in ln u / (u - 1)."""
    u = 1.0 + x
    r = tl.log(u) * (x / (u - 1.0))
    return tl.where(u == 1.0, x, tl.where(u == float("inf"), u, r))

def round_even(x, big):
    """The nearest integer, halves to even; from ``big`` on every number is an integer."""
    a = tl.abs(x)
    r = (a + big) - big
    r = tl.where(x < 0, r * -1.0, tl.where(r == 0, x * 0.0, r))
    return tl.where(a < big, r, x)

def trunc(x):
    """x rounded towards 0."""
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))

def power(x, y):
    """x^y as e^(y ln|x|) in f64, which leaves f32 its accuracy."""
    base = x.to(tl.float64)
    a = tl.abs(base)
    b = y.to(tl.float64)
    r = tl.exp(b * tl.log(a))
    r = tl.where((a == 1.0) | (b == 0.0), 1.0, r)
    whole = tl.floor(b) == b
    odd = whole & (tl.floor(b * 0.5) * 2.0 != b)
    signed = tl.where(whole, tl.where(odd, r * -1.0, r), tl.where((a == 0.0) | (a == float("inf")), r, float("nan")))
    r = tl.where((base == 1.0) | (b == 0.0), 1.0, tl.where(base.to(tl.int64, bitcast=True) < 0, signed, r))
    return r.to(x.dtype)

def power_int(x, y):
    """x^y by squaring, wrapping around; a negative exponent leaves 1 and -1 only."""
    bits: tl.constexpr = y.dtype.primitive_bitwidth
    r = x * 0 + 1
    square = x
    for bit in tl.static_range(bits):
        r = tl.where(((y >> bit) & 1) != 0, r * square, r)
        square = square * square
    if y.dtype.is_int_signed():
        inverse = tl.where(x == 1, 1, tl.where(x == -1, 1 - 2 * (y & 1), 0))
        r = tl.where(y < 0, inverse, r).to(x.dtype)
    return r

def atan2(y, x):
    """The angle of (y, x) in f32: a polynomial on [0, 1], then reflections."""
    ax = tl.abs(x)
    ay = tl.abs(y)
    big = tl.maximum(ax, ay, propagate_nan=tl.PropagateNan.ALL)
    small = tl.minimum(ax, ay, propagate_nan=tl.PropagateNan.ALL)
    t = tl.where(big == 0, big, tl.where(small == float("inf"), 1.0, small / big))
    s = t * t
    p = ((2.78569828e-3 * s - 1.58660226e-2) * s + 4.24722321e-2) * s - 7.49753043e-2
    p = (((p * s + 1.06448799e-1) * s - 1.42070308e-1) * s + 1.99934542e-1) * s - 3.33331466e-1
    r = p * s * t + t
    r = tl.where(ay > ax, 1.5707963267948966 - r, r)
    r = tl.where(x.to(tl.int32, bitcast=True) < 0, 3.141592653589793 - r, r)
    return tl.where(y.to(tl.int32, bitcast=True) < 0, r * -1.0, r)

def floor_divide(x, y):
    """floor(x / y), from the exact remainder."""
    m = x % y
    q = (x - m) / y
    q = tl.where((m != 0) & ((y < 0) != (m < 0)), q - 1.0, q)
    f = tl.floor(q)
    f = tl.where(q - f > 0.5, f + 1.0, f)
    return tl.where(y == 0, x / y, tl.where(q == 0, x / y * 0.0, f))

def remainder(x, y):
    """x - y floor(x / y), with the sign of y."""
    m = x % y
    return tl.where((m != 0) & ((y < 0) != (m < 0)), m + y, m)

def shift_left(x, y, bits):
    """x * 2**y, by 0 to bits - 1; any other y leaves no bit."""
    inside = (y >= 0) & (y < bits)
    return tl.where(inside, x << tl.where(inside, y, 0), 0).to(x.dtype)

def shift_right(x, y, bits):
    """floor(x / 2**y), by 0 to bits - 1; any other y leaves the sign alone."""
    inside = (y >= 0) & (y < bits)
    return tl.where(inside, x >> tl.where(inside, y, 0), tl.where(x < 0, -1, 0)).to(x.dtype)

def sort_key(x):
    """A 32-bit integer in the order of x; NaN is the largest, and zeros are equal."""
    if x.dtype.is_floating():
        bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
        key = tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    else:
        key = x.to(tl.int32)
    return key

def places_in_order(key, place):
    """The places of the keys in ascending order, equal keys in the order of their places."""
    return tl.sort((key.to(tl.int64) << 32) | place.to(tl.int64)) & 0xFFFF

def floor_divide_int(x, y):
    """floor(x / y)."""
    q = x // y
    return tl.where((x % y != 0) & ((x < 0) != (y < 0)), q - 1, q)
'''


def _split(source: str) -> dict[str, str]:
    parts = re.split(r"^(?=def )", source.strip(), flags=re.MULTILINE)
    return {part.split("(", 1)[0].removeprefix("def "): part.strip() for part in parts if part}


FUNCTIONS = _split(_FUNCTIONS) | _split(_ROUND_BF16)
"""Text of every device function, by name."""


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"(?<![.\w]){name}", text) is not None


def prelude(code: str) -> str:
    """The device functions that a kernel's text calls, and those that they call, in the order of this file."""
    wanted = {name for name in FUNCTIONS if _mentions(code, rf"{name}\b")}
    for name in reversed(FUNCTIONS):
        if name in wanted:
            wanted |= {other for other in FUNCTIONS if other != name and _mentions(FUNCTIONS[name], rf"{other}\(")}
    return "".join(_defined(text) for name, text in FUNCTIONS.items() if name in wanted)


def for_interpreter(source: str) -> str:
    """Return the text of a kernel for the interpreter, which does not round bf16, and is passed f32 instead."""
    rounding = [_defined(text) for text in _split(_ROUND_BF16).values()]
    if not any(text in source for text in rounding):
        return source
    for text in rounding:
        source = source.replace(text, "")
    head, mark, rest = source.partition("@triton.jit")
    return head + "".join(map(_defined, _split(_ROUND_BF16_BITS).values())) + mark + rest


def _defined(text: str) -> str:
    return f"@triton.jit\n{text}\n\n\n"
