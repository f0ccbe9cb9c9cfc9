"""How much room the pieces of an ordered sum have at most: a plan leaves it, so it is known without torch."""

from __future__ import annotations

PIECES = 3  # at most
MOST_BYTES = PIECES * (16 << 20)  # larger pieces are not summed faster
