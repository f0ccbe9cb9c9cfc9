"""WHAT is trained: model shapes as data, builders, exact FLOPs, initial weights, data and loss.

The folder is the registry: a model family is one module here that defines `FAMILY`. Nothing here knows of offload,
devices' budgets or the harness. Start at `registry.py`.
"""
