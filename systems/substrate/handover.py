"""Parameters on their way into the bundles' storages, and out again, by the host's slots, when an engine closes.

Note [Identity of parameters]
    A parameter with values keeps its object, so that an optimizer's groups still mean it; only its data is exchanged, once.
    A parameter on the meta device is replaced by a new object in every module that owns it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from systems.planning.layout import Layout
from systems.planning.plan import Tier
from systems.ranks.side_by_side import side_by_side
from systems.recipe.model.giving_back import check_free
from systems.recipe.model.parameters import set_data
from systems.recipe.model.units import FoundModel
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.segments import follows, joined
from systems.substrate.bundle.store import Store
from systems.substrate.bundle.values import StoredValues


def adopt_parameters(
    found: FoundModel, layout: Layout, bundles: Sequence[ManagedBundle], dtype: torch.dtype
) -> tuple[nn.Parameter, ...]:
    """Make every parameter a view of its bundle's storage. Returns the final parameter objects, in index order."""
    final: list[nn.Parameter] = list(found.parameters)
    for number, place in layout.places.items():
        old = found.parameters[number]
        view = bundles[place.bundle].storage.view(dtype, place.offset, tuple(old.shape))
        if old.is_meta:
            new = nn.Parameter(view, requires_grad=old.requires_grad)
            for module, attribute in found.owners[number]:
                module._parameters[attribute] = new
            final[number] = new
        else:
            set_data(old, view)
            old.grad = None
    return tuple(final)


def values_in_slots(store: Store, bundles: Sequence[ManagedBundle], values: StoredValues) -> list[list[torch.Tensor]]:
    """Every parameter's values in the compute dtype, flat, as one piece or several of the slots' memory.

    That is theirs from then on; on several ranks each gets copies of all. Call only when drained, outside a step, as the last
    thing. Raises BudgetError where the host has no room for what never had a slot, or for the copies.
    """
    ranks, numbers = store.ranks, sorted(store.layout.places)
    with side_by_side(ranks, "values to give back"):
        store.give_slots(more=ranks.size > 1)
        for managed in bundles:
            if managed.states_on_device or not managed.movable:
                for stored, piece in zip(managed.segments, _on_device(managed), strict=True):
                    if stored.tier is Tier.DEVICE or not managed.movable:
                        stored.slot.copy_(piece)
        if ranks.size > 1:
            check_free(ranks.local_size * store.dtype.itemsize * sum(place.numel for place in store.layout.places.values()))
    if ranks.size > 1:  # a shard is in no other rank's memory
        return [[values.at_rest(number)] for number in numbers]
    return [slot_pieces(store, values, number) for number in numbers]


def _on_device(managed: ManagedBundle) -> list[torch.Tensor]:
    """Of its segments, what this rank has of what is updated there, or never moves."""
    if managed.shard.at_home:
        assert managed.shard.block is not None, "a shard that is at home on the device is there"
        return managed.shard.pieces(managed.shard.block)
    assert managed.block is not None, "what is updated on the device, or never moves, is always resident"
    return managed.own_pieces(managed.block)


def slot_pieces(store: Store, values: StoredValues, parameter: int) -> list[torch.Tensor]:
    """The slots of a parameter, neighbours as one; see Store.own."""
    groups: list[list[torch.Tensor]] = []
    for stored, p in values.pieces_of(parameter):
        piece = stored.slot[p.here]
        if groups and follows(groups[-1][-1], piece):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return [store.own(joined(group)) for group in groups]
