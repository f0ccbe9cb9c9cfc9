"""A step's decisions: loss scale, norm, clipping, groups of an optimizer, and which step a call belongs to."""
