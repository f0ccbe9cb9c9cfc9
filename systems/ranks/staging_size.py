"""How much room the pieces of an ordered sum have at most: a plan leaves it, so it is known without torch."""

from __future__ import annotations

MOST_BYTES = 64 << 20  # between two ranks one piece of a bundle as large as is gathered at once (planning/policy/chunks.py)
