"""Feature noise from a counter-based hash: no generator state, so capture, resume and ranks see the same noise."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**24
"""Features that are hashed at a time: bounds the int32 and fp32 temporaries to a few of 64 MB."""


def _signed(word: int) -> int:
    """A 32-bit word as the int32 that holds its bits."""
    return word - 2**32 if word >= 2**31 else word


def _shifted_xor(x: Tensor, bits: int) -> Tensor:
    """x ^ (x >> bits) with a logical shift, which int32 lacks."""
    return x ^ ((x >> bits) & ((1 << (32 - bits)) - 1))


def _mixed(x: Tensor, second: Tensor | int) -> Tensor:
    """A bijection of 32-bit words whose every output bit hangs on every input bit; `second` is keyed in half-way.

    The constants are those of the "lowbias32" hash (C. Wellons, hash-prospector). Products wrap modulo 2^32.
    """
    x = _shifted_xor(_shifted_xor(x, 16) * _signed(0x7FEB352D), 15) ^ second
    return _shifted_xor(x * _signed(0x846CA68B), 16)


def _row_keys(uniforms_T: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 keys a row out of the 53 random bits of its double, mixed: a bit keyed in half-way spreads little."""
    bits_T = (uniforms_T * 2.0**53).to(torch.int64)
    return _mixed((bits_T & 0x7FFFFFFF).to(torch.int32), 0), _mixed((bits_T >> 22).to(torch.int32), 0)


def uniform_noise(uniforms_T: Tensor, num_columns: int) -> Tensor:
    """fp32 [T, columns], independent and uniform in (-1, 1), as a function of each row's double and the column.

    Two keys a row, the second applied between the rounds: with a single one, rows whose keys happen to lie close
    would be shifted copies of each other.
    """
    first_T, second_T = _row_keys(uniforms_T)
    column_C = _mixed(torch.arange(num_columns, device=uniforms_T.device, dtype=torch.int32), 0)
    words = _mixed(column_C ^ first_T[:, None], second_T[:, None])
    # 24 bits and a half: exact in fp32, symmetric, and never an end of the interval.
    return ((words >> 8).to(torch.float32) + 0.5) * 2.0**-23


def noisy(features_TFH: Tensor, uniforms_T: Tensor, half_width: float) -> Tensor:
    """A copy of the features with uniform noise in (-half_width, half_width); the buffer itself where 0.

    Rows are taken in a number of chunks that the shape fixes, so nothing but the copy is as large as the features.
    Padding gets noise too: nothing reads it.
    """
    if half_width == 0.0:
        return features_TFH
    num_rows, width = features_TFH.shape
    step = max(1, CHUNK_ELEMENTS // width)
    noisy_TFH = torch.empty_like(features_TFH)
    for low in range(0, num_rows, step):
        rows = slice(low, min(low + step, num_rows))
        noise = uniform_noise(uniforms_T[rows], width) * half_width
        noisy_TFH[rows] = (features_TFH[rows].to(torch.float32) + noise).to(features_TFH.dtype)
    return noisy_TFH
