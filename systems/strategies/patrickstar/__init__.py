"""PatrickStar (Fang et al., "Parallel Training of Pre-trained Models via Chunk-based Dynamic Memory Management").

The paper's words and where they are here

| paper | here |
|---|---|
| chunk lists: param fp16, param fp32, momentum, variance (6.1.1) | one Segment's offsets for all four; `chunks.LISTS` |
| tensor-chunk mapping, chunk size search, table 3 | `chunks.PatrickStarChunker`; options chunk_min, chunk_max, chunk_step |
| communication group of nproc continuous chunks (6.2) | one Segment and Bundle; `groups.communication_group` |
| local chunk, remote chunks | this rank's shard of it, the others' |
| FetchRemoteChunks, ReleaseRemoteChunks (Algorithms 1 and 2) | GATHER within FETCH; DROP, and REDUCE at the flush |
| tensors labelled not managed in chunks | a Bundle of their own: several users, or larger than any allowed chunk |
| tensor states, figure 6, Algorithms 1 and 2 | who holds a bundle; the names are a test's (patrickstar_states.py) |
| grad fp16 reuses the param fp16 chunk (figure 5) | Layout.in_place and Plan.in_place; `planning.step.demand.reusable` |
| moment i; R_i, C_i, N_i (figures 2 and 9) | Trace.moments; the account's live and pool bytes; Trace.non_model_bytes |
| L, A_i = L - max(N_i, N_i-1) (7.3) | PlanningContext.device_budget; `placement.PatrickStarDivision.room`, see `tracer.py` |
| 20 % of GPU memory and chunk list order in the warm-up step (7.3) | option warmup_share; `policy.eviction.ModelOrder` |
| eviction of the longest future reference chunk | `policy.caching`; `policy.eviction.FarthestNextUse` outside a plan |
| evicted chunk goes to the CPU | OpKind.WRITE_BACK |
| grad chunk stays where it is until ADAM (6.1.2) | Plan.staying, under `paper` |
| margin space, device-aware operator placement (7.2), table 4 | `tracer.margin`, `placement.in_the_margin` |
| largest model (8.2.1) | `warm_up.warm_up_share`, under `paper` |
| SpongeBob (7.4), SP, OSC (8.2.4, figure 15) | variants spongebob, static-partition, osc: `paper` but for one rule each |

The default (variant=base) is this strategy's best. variant=paper has the paper's own rules: the table at the end sets them side
by side, and where that one departs from the paper too is said here, of both unless it says of which.

Where this departs from the paper, and why

* Moments are those at which a transformer block, or a module outside of blocks, starts and ends, not each operator: all chunks
  of a block are held together, and the least memory is a block's.
* The host keeps the memory of a chunk that is on the device (statistics: copied_bytes): pinned memory cannot be given back
  and taken again in the middle of a step. So WRITE_BACK writes bytes that are there already; it is done and counted because
  the paper's chunks move. The optimizer's host memory is given back while its chunks are on the device.
* The chunks are in the compute type: with fp32 runs the first list has 4 bytes a parameter. The tail of a chunk is not
  allocated; `utilization` counts it as the paper does. Of a communication group all chunks are as long as the fullest, and
  its parameters are spread over them as evenly as their order allows.
* Without a range given, sizes from a quarter of the largest block to the whole block are tested. The paper's 128 to 512 Mi
  elements are for models whose blocks are that large: for those `paper` has them. Of several ranks that is a group's, small
  blocks are gathered whole, and what lies out of chunks there, Note [Chunks of several ranks] in `chunks.py` says.
* The serial broadcasts and reductions of 6.2, in which one chunk is the buffer, are not built: here a collective has no
  buffer beside the group, whose chunks are gathered and reduced where they lie.
* Gradients take the place of parameters that are updated on the host, and of several ranks that rest on the device as a
  chunk of their group, of which compute has a copy. Where one rank's optimizer chunk is in the margin they stay in autograd's
  own buffers until the update, as plain training has them: no copy, but 2 bytes a parameter more. They have
  ranges of their own with several micro-batches (fp32 accumulators need the parameters again), for tied parameters, and
  where a traced step uses a unit twice; statistics: gradients, num_ranged; counter gradient_detours for what no plan knew.
* In the default a gradient leaves at its flush, and from there on a parameter chunk is not on the device until the update has
  made it anew. Under `paper` it stays until ADAM unless it is evicted, but not in the warm-up step, which has no plan, nor
  where it has a range, nor on several ranks: there it leaves, or its shard does, at its flush.
* Of several ranks a group's remote chunks are released as room is needed, not as soon as all its tensors are HOLD_AFTER_FWD or
  HOLD_AFTER_BWD (Algorithm 2).
* An optimizer chunk on the device keeps its parameter chunk there: the device's update is made on that. In the margin both
  have room, but not the gradients in autograd's buffers beside them, which may evict parameter chunks in backward; where they
  leave no room for what a unit holds, fewer optimizer chunks are placed. Which ones the paper does not say: the first of the
  list. A chunk's three lists are placed together.
* N_i is the highest memory between two moments, not a sample at them. It is no less, so the room is no more than the paper's.
* The updates of a step wait for the norm, and a step that is not finite is skipped (nonfinite=skip): the paper says nothing of
  either but that ADAM comes after BWD. With fp16 loss scaling needs it.
* static-partition is refused where activations do not fit beside the fixed share of chunks, and what a unit holds is there even
  if it is more than the share.
* For what the host lacks whole chunks with all their lists live on the device for good; in the paper any chunk may be in either
  memory at any time. So the bound of 8.2.1 holds under `paper` within a chunk and what a unit holds.
* The embedding is a unit like others: fetched, computed on the device. Computing it on the CPU is in the authors' code, but not
  in this paper.
* Activations offloaded to the host (option activations=host) are the inputs of recomputed blocks (--recompute), each moved
  while its neighbours compute. What a block that is not recomputed keeps for its backward stays on the device.
* The optimizer chunks start on the host. What it lacks room for is on the device from the start (figure 8, right half), in the
  default as far as the device has room, under `paper` within the warm-up share.

| rule of the paper | `paper` | default | measured difference |
|---|---|---|---|
| a chunk is fetched when an operator accesses it (6.1.2) | prefetch=0: when all before has been computed | prefetch=8 | - |
| warm-up: 20 % of the device, chunk-list order (7.3) | the same, of all model data | the same, beside what never moves | - |
| the longest future reference chunk is evicted (7.3) | OPT, ADAM being the next use of a gradient | OPT with prefetching | - |
| ADAM after BWD (6.1.2) | run_ahead=False, nonfinite=skip | updates run ahead of the norm in spare host memory | - |
| grad chunk stays in the param chunk until ADAM (6.1.2) | Plan.staying | leaves as it is complete | - |
| OS chunks in the margin beside peak non-model data (7.2) | one margin for the step | what is free at each moment | - |
| chunk size: 128 to 512 Mi elements, step 32 Mi (8.1) | where a block is that large | a range that suits model and host | - |
| largest model: (0.2 L + host) x utilization / 14 (8.2.1) | the same | (L + host) x utilization / 14 less activations | - |
| OSC: optimizer chunks fixed on the CPU (8.2.4) | variant=osc, all else as `paper` | - | - |
| SP: no tracer, 20 % fixed for model data (8.2.4) | variant=static-partition, chunk-list order | - | - |
| SpongeBob: tensors, not chunks (7.4) | variant=spongebob, all else as `paper` | - | - |
| all of these, ps-4b in 20 GiB on one H200 (docs/results.md) | 1.583 s a step | 1.095 s a step | 0.67x |
| all of these, opt-6.7b in 40 GiB on one H200 (the same page) | 2.160 s a step | 1.503 s a step | 0.69x |
"""

from systems.strategies.patrickstar.strategy import PatrickStar

STRATEGY = PatrickStar
