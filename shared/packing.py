"""Columns on the wire: token ids as little-endian int32, log-probabilities as float32, concatenated."""

import sys
from array import array
from collections.abc import Iterable
from typing import Any

NO_TOKEN = -1
"""Stands in a packed row array where a row yielded nothing in that step."""


def pack_int32(values: Iterable[int]) -> bytes:
    """Pack `values` as little-endian int32.

    Raises:
        OverflowError: a value does not fit 32 bits.
    """
    return _pack("i", values)


def unpack_int32(data: bytes) -> "array[int]":
    """The inverse of `pack_int32`.

    Raises:
        ValueError: the length of `data` is no multiple of 4.
    """
    return _unpack("i", data)


def are_tokens(data: bytes) -> bool:
    """Whether whole packed int32 are token ids or NO_TOKEN: nothing else is negative."""
    return data[3::4].isascii() or min(unpack_int32(data), default=0) >= NO_TOKEN


def pack_float32(values: Iterable[float]) -> bytes:
    """Pack `values` as little-endian float32."""
    return _pack("f", values)


def unpack_float32(data: bytes) -> "array[float]":
    """The inverse of `pack_float32`.

    Raises:
        ValueError: the length of `data` is no multiple of 4.
    """
    return _unpack("f", data)


def _pack(typecode: str, values: Iterable[Any]) -> bytes:
    packed = values if isinstance(values, array) and values.typecode == typecode else array(typecode, values)
    if sys.byteorder == "big":
        packed = array(typecode, packed)
        packed.byteswap()
    return packed.tobytes()


def _unpack(typecode: str, data: bytes) -> "array[Any]":
    values: array[Any] = array(typecode)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
