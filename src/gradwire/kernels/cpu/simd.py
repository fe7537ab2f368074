"""LLVM intrinsics for what plain Numba loops cannot express: bit casts, FMA, and vector masks."""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import extending
from numba.core import types
from numba.np.arrayobj import make_array

# Functions that generate LLVM code when a loop that calls them is compiled.
intrinsic = cast(Callable[[Callable[..., Any]], Any], extending.intrinsic)
_array_at: Any = make_array

LANES = 32
"""Entries of one mask; the compiler splits them into vectors of the CPU."""

_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)


@intrinsic
def bits_of(typing: Any, number: Any) -> Any:
    """Returns the bits of a float32 as an int32."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), write


@intrinsic
def number_of(typing: Any, bits: Any) -> Any:
    """Returns the float32 with the bits of an int32."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), write


@intrinsic
def sum_of(typing: Any, x: Any, decay: Any, residual: Any) -> Any:
    """Returns x + decay * residual in float32, rounded once (FMA), as torch computes it."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(args[1], args[2], args[0])

    return types.float32(types.float32, types.float32, types.float32), write


@intrinsic
def hash32(typing: Any, x: Any) -> Any:
    """Returns the hash of kernels/reference/random.py, in 32 bits where Numba would take 64."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, word_type = args[0], ir.IntType(32)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            word = builder.xor(word, builder.lshr(word, word_type(shift)))
            word = builder.mul(word, word_type(factor))
        return builder.xor(word, builder.lshr(word, word_type(16)))

    return types.uint32(types.uint32), write


@intrinsic
def word_at(typing: Any, data: Any, start: Any) -> Any:
    """Returns four bytes of a uint8 array from `start` on, unaligned, as a uint32."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_at(context, builder, signature, args, ir.IntType(32)), align=1)

    return types.uint32(data, types.intp), write


@intrinsic
def negatives(typing: Any, x: Any, start: Any) -> Any:
    """Returns a uint32 with a set bit for every negative entry of x[start : start + LANES]."""
    return types.uint32(x, types.intp), _compare("<")


@intrinsic
def zeros(typing: Any, x: Any, start: Any) -> Any:
    """Returns a uint32 with a set bit for every zero of x[start : start + LANES]."""
    return types.uint32(x, types.intp), _compare("==")


@intrinsic
def add_either(typing: Any, out: Any, start: Any, bits: Any, low: Any, high: Any) -> Any:
    """Adds `low` where a bit is set, else `high`, to out[start : start + LANES]."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _at(context, builder, signature, args, _FLOATS)
        mask = builder.bitcast(args[2], _MASK)
        terms = builder.select(mask, _broadcast(builder, args[3]), _broadcast(builder, args[4]))
        builder.store(builder.fadd(builder.load(place, align=4), terms), place, align=4)
        return context.get_dummy_value()

    number = types.float32
    return types.void(out, types.intp, types.uint32, number, number), write


def _compare(operator: str) -> Any:
    """Returns the code generator of a mask of comparisons with zero; they are false for NaN."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = builder.load(_at(context, builder, signature, args, _FLOATS), align=4)
        mask = builder.fcmp_ordered(operator, values, ir.Constant(_FLOATS, [0.0] * LANES))
        return builder.bitcast(mask, ir.IntType(LANES))

    return write


def _at(context: Any, builder: Any, signature: Any, args: Any, kind: Any) -> Any:
    """Returns the address of entry args[1] of the array args[0], as a pointer to `kind`."""
    array = _array_at(signature.args[0])(context, builder, args[0])
    return builder.bitcast(builder.gep(array.data, [args[1]]), kind.as_pointer())


def _broadcast(builder: Any, number: Any) -> Any:
    """Returns a vector with the number in all lanes."""
    first = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), number, ir.IntType(32)(0))
    places = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, first, places)
