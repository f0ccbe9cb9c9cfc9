"""Counter-based random bits: word i of a stream is a function of (key, i) alone.

So any part of a stream can be made anywhere, in any order, by any rank, with the same bits on CPU and CUDA. The
function is splitmix64 in wrap-around int64 arithmetic, which torch has on every device; nothing here holds a
generator's state.
"""

from __future__ import annotations

import hashlib

import torch

# splitmix64's constants, as the signed 64-bit integers that torch calculates with.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_SHIFTS = (30, 27, 31)


def stream_key(*parts: str | int) -> int:
    """A signed 64-bit key for the stream named by `parts`; other parts, other key."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_words(key: int, *, start: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 tensor (count,): words start, start + 1, ... of the stream `key`, 64 random bits each."""
    words = torch.arange(start, start + count, dtype=torch.int64, device=device)
    words.mul_(_STEP).add_(key)
    shifted = torch.empty_like(words)
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
        # int64 shifts drag the sign in from the left; the mask makes the shift a logical one.
        torch.bitwise_right_shift(words, shift, out=shifted)
        words.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
        if multiplier is not None:
            words.mul_(multiplier)
    return words
