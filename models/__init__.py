"""WHAT is trained: model shapes as data, builders, exact FLOPs, initial weights, data and loss.

The folder is the registry: a model family is one module here that defines `FAMILY`. Nothing here knows of offload,
devices' budgets or the harness. Start at `registry.py`.
"""

import os
import sys

OWN = tuple(__path__)


def find_namesakes() -> None:
    """A user's own `models/` without an `__init__.py`, which python passes over for an installed package, becomes a part of
    this one: what is in it can be imported, but for modules that are here too.
    """
    for each in sys.path:
        folder = os.path.join(each or os.getcwd(), __name__)
        if folder not in __path__ and os.path.isdir(folder) and not os.path.exists(os.path.join(folder, "__init__.py")):
            __path__.append(folder)


find_namesakes()
