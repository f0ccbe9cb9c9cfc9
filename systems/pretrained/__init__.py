"""A folder in transformers' format as what an engine starts from: a model by its config.json, and its first values.

Somebody else has made the folder, so nothing in it is believed: no pickle is read, no code of its own is run, no name in it
leads out of it, links are not followed, and all that could be wrong with the weights is told by name before training. Values
are read tensor by tensor, straight into the master weights. The way out is Engine.save_pretrained (systems.export).
"""

from systems.pretrained.files import FLOATS, Stored, folder_of, stored_tensors
from systems.pretrained.model import model_of
from systems.pretrained.on_meta import parameters_on_meta
from systems.pretrained.weights import FolderWeights, folder_weights, keys_of

__all__ = [
    "FLOATS",
    "FolderWeights",
    "Stored",
    "folder_of",
    "folder_weights",
    "keys_of",
    "model_of",
    "parameters_on_meta",
    "stored_tensors",
]
