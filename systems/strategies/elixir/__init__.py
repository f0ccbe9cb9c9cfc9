"""Elixir (Li et al., "Elixir: Train a Large Language Model on a Small GPU Cluster"): chunks, R cache, Belady.

The paper's words and where they are here

| paper | here |
|---|---|
| chunk group ("Initialization Algorithm") | FlatSpace: parameters of one data-parallel group, frozen ones apart |
| chunk | Segment, and the Bundle of it; `chunks.py` cuts them |
| search range of chunk sizes | options chunk_min, chunk_max, chunk_step; `chunks.ElixirChunker` |
| small group fused into one chunk that never moves | Bundle with movable=False |
| fully symmetric partitioning | Segment.shard_numel: even split over the group's ranks |
| R cache, C_SIZE | option cache; `placement.py` gives it its bytes, `policy.caching` its content |
| random eviction in the warm-up step, Belady after it | `policy.eviction` |
| master copy of each shard in CPU memory | variant master-shard: eviction is a DROP; write-back is the ablation |
| [S_FLAG, O_FLAG, C_SIZE] | options scatter, offload, cache |

Where this departs from the paper, and why

* The tail of a chunk is not allocated: the pool takes blocks of any size, and so a budget just above what plain
  training needs moves no byte. `statistics` counts waste and utilisation at the searched size, as the paper does.
* A unit whose parameters do not fit into what is left of a chunk begins a new one, so that a transformer block is not
  spread over its neighbours' chunks. It costs no memory, as tails do not, and holds the least during a block's
  backward.
* A parameter used by several units (tied weights) gets a bundle of its own per set of users: sharing a chunk with a
  block would keep that block's gradients on the device from one use to the other. So does one that is larger than a
  chunk.
* Without a range given, sizes from a quarter of the largest block (but no less than its largest parameter) to the whole
  block are tested; among equals the larger wins, for longer transfers. Of several ranks small blocks are gathered whole:
  `ChunkCutter.least` in `systems/planning/policy/chunks.py`.
* A small group is only fused for good if that takes at most a sixteenth of the device budget.
* Optimizer states of the first units live on the device while there is memory beside working set and prefetches, since
  they save the most host bandwidth. Their updates run there. The paper leaves the optimizer's placement to O_FLAG
  alone.
* Belady alone stalls at every miss; here the next bundles in order of use are fetched ahead (option prefetch).
* C is a constant as in the paper, yet never more than what activations leave at each moment.
* Inputs of recomputed blocks may wait for their backward in host memory (option activations); the paper has no such thing.
* Without offload each of several ranks has its shards of parameters, states and, until the norm is known, gradients on the
  device, and C bounds the chunks that were brought together (ZeRO-3); with all of them there for good (C = inf, or auto where
  that fits) it is ZeRO-2. Chunks whose states are cached on the device with offload rest as shards too.
* Without scatter all of several ranks have all chunks and states for good and make the same updates (DDP): a gradient is
  reduced and gathered in its range. That goes without offload and with C = inf alone.
"""

from systems.strategies.elixir.strategy import Elixir

STRATEGY = Elixir
