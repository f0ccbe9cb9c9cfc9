"""The mechanism: tiers, lanes, transfers, storages, hooks, gradients and the optimizer, which carry out any Plan.

Policy is not here: nothing in this package decides what to move or when.
"""
