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
| 20 % of GPU memory and chunk list order in the warm-up step | option warmup_share; `policy.eviction.ModelOrder` |
| eviction of the longest future reference chunk | `policy.caching`; `policy.eviction.FarthestNextUse` outside a plan |
| evicted chunk goes to the CPU | OpKind.WRITE_BACK |
| margin space, device-aware operator placement (7.2), table 4 | `tracer.margin`, `placement.in_the_margin` |
| SpongeBob, SP, OSC | variants spongebob, static-partition, osc |

Where this departs from the paper, and why

* Chunks are fetched ahead of their use (option prefetch). prefetch=off is the paper's: Belady's demand paging.
* The host keeps the memory of a chunk that is on the device (statistics: copied_bytes): pinned memory cannot be given back
  and taken again in the middle of a step. So WRITE_BACK writes bytes that are there already; it is done and counted because
  the paper's chunks move. The optimizer's host memory is given back while its chunks are on the device.
* The chunks are in the compute type: with fp32 runs the first list has 4 bytes a parameter. The tail of a chunk is not
  allocated; `utilization` counts it as the paper does. Of a communication group all chunks are as long as the fullest, and
  its parameters are spread over them as evenly as their order allows.
* Without a range given, sizes from a quarter of the largest block to the whole block are tested. The paper's 128 to 512 Mi
  elements are for models whose blocks are that large. Of several ranks that is a group's, small blocks are gathered whole, and
  what lies out of chunks there, Note [Chunks of several ranks] in `chunks.py` says.
* The serial broadcasts and reductions of 6.2, in which one chunk is the buffer, are not built: here a collective has no
  buffer beside the group, whose chunks are gathered and reduced where they lie.
* Gradients take the place of parameters that are updated on the host, and of several ranks that rest on the device as a
  chunk of their group, of which compute has a copy. Where one rank's optimizer chunk is in the margin they stay in autograd's
  own buffers until the update, as plain training has them: no copy, but 2 bytes a parameter more. They have
  ranges of their own with several micro-batches (fp32 accumulators need the parameters again), for tied parameters, and
  where a traced step uses a unit twice; statistics: gradients, num_ranged; counter gradient_detours for what no plan knew.
* After its gradient has left, a parameter chunk is not on the device until the update has made it anew: the paper holds the
  gradient chunk where it is until ADAM, and moves it then.
* N_i is the highest memory between two moments, not a sample at them. It is no less, so the room is no more than the paper's.
* static-partition still evicts by Belady's rule: the paper does not say by which one, and any other would be a second change.
* The embedding is a unit like others: fetched, computed on the device. Computing it on the CPU is in the authors' code, but not
  in this paper.
* Activations offloaded to the host (option activations=host) are the inputs of recomputed blocks (--recompute), each moved
  while its neighbours compute. What a block that is not recomputed keeps for its backward stays on the device.
* The optimizer chunks all start on the host, so that memory the host lacks cannot be made up for on the device (figure 8).
"""

from systems.strategies.patrickstar.strategy import PatrickStar

STRATEGY = PatrickStar
