"""Checkpoints: all that an engine needs to go on with training, by parameter name, whatever system made it.

A folder holds `checkpoint.json` and the subfolder that this names, with safetensors files: in fp32 each parameter's value (the
master weight) and the optimizer's moments of those that are trained, and the model's persistent buffers. So a run may go on
with the same optimizer under another system, budget, dtype or device. What belongs to the loop (its data's position, seeds, a
torch optimizer's groups and its scheduler) is there as far as the loop gives it: as `client_state`, a mapping of JSON.

Note [Replacing a checkpoint]
    The new one's files go into a subfolder of their own; then `checkpoint.json` is replaced, which is one operation of the file
    system; then every subfolder that it does not name goes, also what a save that was killed had left. Whatever else lies in
    the folder stays. Who saves holds a lock on the folder alone, who loads shares it.

Note [What is checked]
    A save refuses what a load would: values that are not finite, negative second moments. A load reads regular files alone, no
    links, checks names, shapes, the hash of every file and the range of every value, and only then changes the engine.
"""

from systems.checkpoint.client_state import CLIENT_STATE_BYTES, as_tensor, of_tensor
from systems.checkpoint.experts import AllExperts, SharedState
from systems.checkpoint.loading import Loaded, load, position
from systems.checkpoint.manifest import BESIDE, BUFFERS, MANIFEST
from systems.checkpoint.saving import check_folder, check_room, remove_unfinished, save
from systems.checkpoint.several import ranks_of
from systems.checkpoint.state import (
    SQUARES,
    CheckpointError,
    Control,
    Described,
    LoopState,
    Part,
    SavedParameter,
    SaveError,
    Trained,
    TrainingState,
    copy_into,
    persistent_buffers,
)

__all__ = [
    "BESIDE",
    "BUFFERS",
    "CLIENT_STATE_BYTES",
    "MANIFEST",
    "SQUARES",
    "AllExperts",
    "CheckpointError",
    "Control",
    "Described",
    "Loaded",
    "LoopState",
    "Part",
    "SaveError",
    "SavedParameter",
    "SharedState",
    "Trained",
    "TrainingState",
    "as_tensor",
    "check_folder",
    "check_room",
    "copy_into",
    "load",
    "of_tensor",
    "persistent_buffers",
    "position",
    "ranks_of",
    "remove_unfinished",
    "save",
]
