"""The mechanism: storages, bundles, hooks, gradients, updates and the runtime, which carry out any Plan.

Policy is not here: nothing in this package decides what to move or when.
"""
