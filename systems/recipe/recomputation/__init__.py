"""Recomputation: which units are run again in backward, with what around them, and whether it came out alike."""
