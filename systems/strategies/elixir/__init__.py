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
| chunk "reused as gradients" | Layout.in_place and Plan.in_place, with variant paper |
| master copy of each shard in CPU memory | variants master-shard and paper: eviction is a DROP; write-back is the ablation |
| [S_FLAG, O_FLAG, C_SIZE] | options scatter, offload, cache; which of them mean something is said below |

[S_FLAG, O_FLAG, C_SIZE] as they are here

* [True, True, C]: the cache beside a host, of one rank or several. The same with C = inf leaves C to the device.
* [True, False, C] and [True, False, inf] are of several ranks: one rank's shard of a chunk is the chunk, so that without
  offload it has all of its model on the device, and C and S say nothing.
* [False, False, inf] is of several ranks too. Of those, [False, True, C] and [False, False, C] are refused: a chunk that is
  whole on every device for good has nothing to be offloaded or gathered.

Where this departs from the paper, and why, with every variant

* A unit is a transformer block, or what is beside the blocks: Elixir hooks each torch function ("Overview"), and a block's
  chunks come one by one. Here all chunks of a block are held from its begin to its end, so that C is a block's parameters
  at least.
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
  `ChunkCutter.least` in `systems/planning/policy/chunks.py`. Where the host is short the size is that by which least stays
  on the device beyond what the host lacks: `for_short_host` there.
* Shards are in pinned memory always; the paper has that as an option ("Optimizations for Offloading").
* C is a constant as in the paper, yet never more than what activations leave at each moment: there the paper's run ends for
  want of memory.
* After its gradient has left, a chunk is not on the device until its update has made it anew.
* Of several ranks nothing is evicted in the warm-up step: a chunk goes once its unit is done. And without offload shards and
  states come to the devices with the first plan; the host has room for them.
* Experts that ranks share are chunk groups of their own, as in the paper. One that is fused, and never moves, is a bundle by
  itself, as its gradient is summed over other ranks.
* Without scatter all of several ranks have all chunks and states for good and make the same updates (DDP): a gradient is
  reduced and gathered in its range.

Where the default departs beyond that

* A small group is only fused for good if that takes at most a sixteenth of the device budget, with its states, which are
  updated there.
* Where everything fits the device nothing moves. Else optimizer states of the first units live on the device while there is
  memory beside working set and prefetches, since they save the most host bandwidth. Their updates run there. The paper
  leaves the optimizer's placement to O_FLAG alone.
* A given C bounds parameters, of the units that are updated on the device too; states come on top, and so do gradients: each
  has a range beside its parameters.
* Belady alone stalls at every miss; here the next bundles in order of use are fetched ahead (option prefetch).
* Updates on the host run ahead of the norm (option run_ahead), or start during backward (nonfinite=stop).
* Inputs of recomputed blocks may wait for their backward in host memory (option activations); the paper has no such thing.
* Without offload each of several ranks has its shards of parameters, states and, until the norm is known, gradients on the
  device, and C bounds the chunks that were brought together (ZeRO-3); with all of them there for good (C = inf, or auto where
  that fits) it is ZeRO-2. Chunks whose states are cached on the device with offload rest as shards too.

How `paper` is to be read

* A gradient that cannot take its parameters' place (of tied parameters, of units that run twice, with several micro-batches)
  has a range beside them, and that is in the cache: C bounds both together.
* The fused chunk is there from its first use in a step until its gradient leaves, outside the cache, and nothing evicts it.
  With offload its update runs on the host as all others do, so that the gradient goes there and the new values come with
  the next step's first use. If it is frozen it never moves at all.
* The pre-op hook brings a chunk in the program's order: a fetch begins when all that was computed before has ended
  (Plan.barriers), though the host issues ahead of the device and copies have lanes of their own. The paper says nothing of
  streams.
* C holds in a step without a plan too, and in a pass without gradients. As a plan comes into force what it has on the device
  between two steps (frozen chunks that the cache keeps) is brought there once; from then on nothing comes before its use.
* With C = inf and several ranks all chunks are shards at rest ("all chunks are scattered by default and gathered in the forward
  pass"), and these stay beside the gathered copies: M / ranks more than ZeRO-2 has. The chunks are gathered once a step.
* What the host cannot hold is refused. Only a disk, which the user gives, may have states in its stead.

| rule of the paper | `paper` | default | measured difference |
|---|---|---|---|
| R cache of a size that users set, 1-2 GB ("Replicated Cache", "Experimental Results") | 2GiB, or cache | what is left | - |
| chunks outside the cache are shards ("Introduction"), stored in CPU ("Heterogeneous Training") | all | what has no room | - |
| fp32 computations of the optimizer update in CPU ("Heterogeneous Training") | with O_FLAG | first units' on the device | - |
| gathered in the pre-op hook ("Overview"), no prefetching | prefetch=0, compute waits | prefetch=8 | - |
| the parameters' update follows the backward pass ("Background") | after the norm of all | run_ahead | - |
| chunk reused as gradients ("Relationship with other DP Strategies") | in place | ranges | - |
| small groups bundled, fused, never split or moved ("Initialization Algorithm") | always | up to 1/16 of the device | - |
| random eviction in the warm-up step, Belady after it ("Chunk Replacement Policy") | yes | yes | - |
| master copy of each shard, no write at eviction ("Optimizations for Offloading") | yes | yes | - |
| all of these, ps-4b in 20 GiB on one H200 (docs/results.md) | 1.731 s a step | 1.086 s a step | 0.61x |
| all of these, opt-6.7b in 40 GiB on one H200 (the same page) | 2.678 s a step | 1.398 s a step | 0.52x |
"""

from systems.strategies.elixir.strategy import Elixir

STRATEGY = Elixir
