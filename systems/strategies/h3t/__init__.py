"""H3T (Wang et al., "Efficient Integration of Memory Optimization and Parallelism for High-Throughput Transformer Training").

The paper's words and where they are here

| paper | here |
|---|---|
| layer i, P_i, partitioned P_i^(j) | a block's unit and its Bundle; Segment.shard_numel of it |
| H_i, A_i | Trace.input_bytes; `policy.windows.kept_bytes` |
| S, s_i (sections 3.2 and 3.3) | `switches.EVERY`, `switches.Switches` |
| R, r_i (appendix B.3) | `switches.COMMUNICATION` |
| rematerialise; offload hidden state | Plan.rematerialise; Plan.offload_inputs |
| parameter partition | `compiling.Compiler._released`: dropped after forward (shrunk to a shard that rests), fetched again |
| lazy-prefetching | not on the device at the step's start; else fetched (of several ranks: its shard moved) at STEP_END |
| economical forward, backward | `compiling.Compiler._trigger`: fetched when the layer before is done, else when it begins |
| segment synchronisation | Plan.barriers, `barriers.py`; see below |
| calculation, NVLink and PCI-E streams; segment (figures 4, 7 to 9) | `costs.Clocks`, `costs.Clocks.segment` |
| profiler, S steps | `profiling.Profiler`, option profile_steps |
| ModelSimulator_i: delta, residentMem, peakMem, runtime | `evaluation.Tables`; `costs.memory` |
| Runtime(s), Memory(s), M, m, T_rand | `evaluation.evaluate`; the device budget; options bins and samples |
| Algorithms 1 and 2; 4 | `solvers.py`; `dynamic.py` |
| global offload of gradients and optimizer | variant global-offload |

Where this departs from the paper, and why

* Of Algorithms 3 and 4 the second is built, for the same optimum from fewer states. Memory is kept exactly beside the
  bins, which only thin many states out: rounding every layer up wastes up to a third of the budget. The search also drops what
  cannot beat greedy's and manual's assignment any more, for speed.
* On one rank there is nobody to gather from: partition means that parameters live on the host between forward and backward. On
  several a shard rests beside the gathered copy, not in it, and a frozen bundle without lazy prefetching stays whole.
* A copy that leaves the device frees its room at once, and who gets it waits for that copy. So the paper's economical mode,
  which saves the memory of what is still leaving, would change nothing; here it saves the memory of what is coming.
* Segment synchronisation is a barrier where a segment of a layer with the switch on ends: compute and copies (of several
  ranks gathers and reductions too) wait for each other, the host's updates go on. On one rank the gather stream is idle, but
  copies still wait. It saves no memory here, where a copy that leaves frees its room at once, and takes time that a copy could
  have run on. Dynamic programming has it on everywhere because its cost model needs that, not its plan. So `best` runs
  each assignment without any; a solver asked for by name is run as solved.
* A hidden state leaves only where its layer rematerialises; otherwise it is the least of what the layer keeps.
* `--recompute full` or block numbers hold the switch of those layers on; without, the solver decides for every layer.
* A layer that edits its own input in place cannot be recomputed, which the profiler's first step does: it is refused.
* Parameters outside the layers (embedding, head) are no layers: they are resident, fetched early, or on the device only while
  held, whichever is fastest by simulated time.
* Updates begin when the norm is known (option nonfinite), and first layers' first; the paper updates without a norm.
* What no step has measured yet, A_i of a layer that was always rematerialised, is bounded by its backward's peak.
* The copy and update rates at run time are those of a hardware profile (option hardware), not measured from the run.
"""

from systems.strategies.h3t.strategy import H3T

STRATEGY = H3T
