"""The schedule on a virtual clock: rates, lanes, work, and its trace."""
