"""Which ranks hold a parameter together, by name: known without torch.

Note [Experts in groups]
    E ranks may share one set of experts, each with its own part of it: `expert_ranks`. N ranks are N / E replicas of E ranks
    then, in the order of a mesh of these two dimensions: rank = replica x E + expert rank. A module whose attribute
    `data_parallel` is "replica" has values that only the N / E ranks of its expert rank have; they cut them into shards, gather
    them and sum their gradients. All else is the world's.

    Plans are equal on all ranks: the parameter of a number has the same shape on each, and is another expert, by name, on a
    rank of another expert rank. So what ranks tell each other of such a number is heard from those of the own group alone, and
    what leaves an engine goes by names, of which experts have their global number.
"""

from __future__ import annotations

WORLD = "world"
REPLICA = "replica"
EXPERTS = "experts"  # ranks that share one set of experts, between which tokens go
