"""Angel-PTM (Nie et al., "Angel-PTM: A Scalable and Economical Large-scale Pre-training System in Tencent").

The paper's words and where they are here

| paper | here |
|---|---|
| page, at most two tensors a page (4.1, figure 3) | Segment; `pages.py` cuts them; option page, 4 MiB as in the paper |
| tensor and its page list (figure 4) | Placement.start, Layout.places: a tensor's pages lie one behind the other in its layer |
| merge (figure 4), device index -1 | `paging.py`; Work.MERGE, Note [Pages] in `systems/planning/plan.py` |
| tensors smaller than a page have one of their own | `pages.py`; statistics: num_small_pages, wasted_bytes |
| layer l_i | Unit, and the Bundle of its pages |
| tracer: first_id, end_id, times (section 5) | Trace; Demand.hold_spans, Trace.compute_time_s |
| trigger id | moment; 0 is the end of the step before, see `scheduling.py` |
| Algorithm 1, S, wait_stack | `popping.py`, `scheduling.py`, `paging.py`, of several ranks `gathering.py`; Plan.operations |
| get_available_memory | the room that `placement.py` leaves |
| move_to_gpu, all_gather | one rank: OpKind.FETCH, or MOVE of pages, and nothing; several: MOVE, and FETCH of what was moved |
| send, receive (figure 3) | what GATHER does: in place, over the memory of the whole layer |
| optimizer states cached on the GPU, updates moved there (4.2) | `placement.py`, `policy.optimizer_cache`; option cache |
| SSD storage (4.2, 4.3) | Layout.on_disk, `planning.disk_layout`, `policy.homes` |
| buffered 16-bit parameters and gradients, p'16 and g'16 (4.3) | the host slot of a segment, which has them in turn |
| the same of lock-free updating | option max_staleness: BufferedBundle.versions and .sums, two each |
| updating thread, buffering thread (Algorithm 2) | option max_staleness: UpdatingThread, and the host's lane, which adds |
| allocator, executor, communicator (section 5) | the substrate's pools and lanes |

Where this departs from the paper, and why

* A layer's pages come and go together, but for variant=paper on one rank. What the paper moves and updates page by page is one
  copy and one update, where pages follow each other; only pages whose states are on the disk are updated one by one. A schedule
  by layers has as many triggers as there are layers.
* A page is as long as what is in it, if that is less than a page: the pool takes blocks of any size. `utilization` and
  `wasted_bytes` count whole pages, as the paper's allocator has them.
* The paper's loop goes over the layers once. Here it goes over forward and backward, where a layer is used twice and its pages
  may stay in between or be moved again. There "the last movement" and the top of the wait stack are taken in order of use: the
  same as the paper's while each layer is used once, and while not, what is not needed soonest goes first.
* On one rank all_gather moves nothing, so phase 2 advances the moves themselves. What it brings back to where the pages were
  used last is not moved at all.
* A moment is one of a transformer block's, or of another module with parameters of its own, where the paper's tracer sees each
  tensor's operators.
* On several ranks a gathered layer lies beside this rank's pages, which stay for its next use. Where a move and its gather have
  one trigger, and the pages do not stay after the use, both are one FETCH, with no pages beside the layer. So comes a layer
  whose pages had no room ahead of its use, too. Phase 2 leaves moves, but for one that its gather has reached: both go on
  together. A gather that reaches the use before is none, and the layer stays.
* Phase 1 leaves room for the layer that is gathered next, beside the one that is computed with. The paper fills memory with
  moves; then phase 2 has nothing to advance an all_gather into, and each layer waits for its own.
* Gathers are issued in order of use, where the paper's communicator reorders its queue. The link carries out what it is given
  in order of issue, so that a gather needed later, whose pages still come, would hold up those needed before it.
* Pages of parameters that the device updates never leave it. The cache for optimizer states takes what no parameter needs
  (option cache=auto), because the paper has it "after previous assignments", or as many bytes as are given.
* A layer's gradients have memory of their own on the device until its backward ends, and then lie in the host's pages of their
  parameters: 14 bytes a parameter on the host (4 more with several micro-batches, for their sum), where the paper has 16 with
  both buffers.
* What a layer has frozen, and parameters that several layers use, are layers of their own.
* The SSD takes the optimizer states that the host has no memory for (--disk), those of the last layers first; with
  states=disk all of them, as in the paper. It serves every strategy, so it is the substrate's.
* Layers that host and disk have no memory for are on the device for good, with their states, whatever option cache says.
* Lock-free updating (Algorithm 2) is an option, max_staleness=K: without it a step's updates are done before their parameters
  are used again. As printed it loses gradients that arrive between lines 5 and 12; here there are two sums,
  which change places as an update begins. Line 20 may read a layer in backward as another than in forward; here what a step
  has read it reads again, in all its micro-batches. Nothing bounds what is printed; here a fetch waits until the layer lacks
  the gradients of K steps at most. Line 3 goes over the layers in reverse; here a layer is next that steps wait for, the one
  that is used first, and where they wait for none that whose size times the gradients that it could still take is least. Sums
  are added up in 16 bits, as the paper's (in fp32 with several micro-batches), and an update is one step of the optimizer at
  the learning rate of the newest gradient in its sum.
* Lock-free on several ranks, each updates its shards behind its steps. A gather brings together the versions that each has
  come to, K steps behind at most: so shards of a layer may be of several, but all ranks compute with the same values.
* Lock-free, a gradient that is not finite ends the run (nonfinite=stop), for it cannot be taken out of a sum; nothing is
  clipped, and fp16 is refused. With K above 0 the results depend on timing. Who looks at weights (a checkpoint, evaluation,
  the end) waits until all gradients are in them, and steps without a plan are synchronous. 8 bytes a parameter on the host
  beside the slot, through which gradients arrive, and states (12 with several micro-batches).

variant=paper has the paper's rules. On one rank the page is the unit: a part of a layer may rest as the rest streams, in pages
that are not contiguous. On several ranks it is the layer, for there a rank's pages are its shard, which moves as one. Of pages:

* Where all of a layer comes at one trigger its pages are contiguous, and nothing is merged. Else they are copied to memory for
  all of the layer at its use, beside which they lie for that long: Algorithm 1's size(l_i). What the paper merges by tensor is
  merged by layer, whose parameters have one storage. Behind the use pages that stay are left where the layer was, uncopied.
* Where there is no room to merge, and only then, pages of the layer itself may be popped at its use, which brings them anew.
* Pages that wait at their use have no line: they are moved at its trigger, and come last in S, in the layer's order.
* Small pages that follow each other move together as long as they fill no more than a page: a page as large as a layer is a
  whole layer, whose plan is that of whole layers to the operation.
* The optimizer cache (4.2) has whole layers. Memory for a layer that is computed with is one hole in the device's pool.


| rule of the paper | `paper` | default | measured difference |
|---|---|---|---|
| the last movement is popped, the last page popped is pushed (lines 8, 9, 15) | so | by order of use | - |
| phase 2 advances all_gather (lines 17 to 22) | so; on one rank there is none | and moves, on one rank | - |
| phase 1 fills memory with moves (lines 13 to 16) | so | room is left for the layer gathered next | - |
| a page is what moves (lines 4, 8, 14, 15) | so; whole layers on several ranks | whole layers | `harness figure angel-pages` |
| updates behind the steps (Algorithm 2) | - (pages do not go with it yet) | max_staleness | - |
| the CPU updates what is home (Algorithm 2, line 5; figure 1) | nonfinite=stop | behind the norm, or ahead of it | - |
| cache of states "after previous assignments" (4.2) | so (cache=auto) | so, or as many bytes as are given | - |
| all of these, ps-4b in 20 GiB on one H200 (docs/results.md) | 1.142 s a step | 1.160 s a step | 1.02x |
| all of these, opt-6.7b in 40 GiB on one H200 (the same page) | 1.518 s a step | 1.495 s a step | 1.02x |
"""

from systems.strategies.angel_ptm.strategy import AngelPTM

STRATEGY = AngelPTM
