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
| economical forward, backward | `segments.PaperCompiler`: what is queued first; by default `compiling.Compiler._trigger` |
| segment synchronisation | Plan.barriers, `barriers.py`; see below |
| calculation, NVLink and PCI-E streams (figures 4, 7 to 9) | lanes, Plan.one_copy_queue; in the cost model `costs.Clocks` |
| segment | Note [Segments] in `costs.py`; `segments.py` |
| profiler, S steps | `profiling.Profiler`, option profile_steps |
| ModelSimulator_i: delta, residentMem, peakMem, runtime | `evaluation.Tables`; `costs.memory` |
| Runtime(s), Memory(s), M, m, T_rand | `evaluation.evaluate`; the device budget; options bins and samples |
| Algorithms 1 and 2; 3; 4 | `solvers.py`; `basic.py`; `dynamic.py` |
| global offload of gradients and optimizer | variants paper and global-offload; by default of the layers behind the first |
| manual; w/o H3T (section 4.1) | solver=manual; solver=on, both with variant=paper |

Where this departs from the paper, and why, whatever the variant

* A moment is the begin or the end of a transformer block's forward or backward, not of an operator; so is a layer the paper's,
  but what the block itself does with parts of its parameters at a time is not seen.
* Memory is kept exactly beside the bins, which only tell which states are alike: rounding every layer up wastes up to a third
  of the budget. Algorithm 4 also drops what cannot beat greedy's and manual's assignment any more, for speed; Algorithm 3 does
  not, and is refused above 10^8 transitions. Its line 14 leaves out the delta that line 17 of Algorithm 4 adds: it is added.
* A hidden state leaves only where its layer rematerialises; otherwise it is the least of what the layer keeps. That makes 96 of
  the 128 settings (48 of 64) differ. It leaves in its own layer's segment, as it is made, not in the next one; it comes back in
  the segment before its own, behind the layer's parameters where the paper has it ahead of them.
* What leaves the device counts until its copy is queued, not until that has ended: who gets the room waits for the copy. In one
  queue copies behind it do so anyway; a gradient's range may stand still where the paper would have needed more memory.
* A layer that edits its own input in place cannot be recomputed, which the profiler's first step does: it is refused.
* Parameters outside the layers (embedding, head) are no layers: they are resident, fetched early, or on the device only while
  held, whichever is fastest by simulated time. The paper does not say.
* `--recompute full` or block numbers hold the switch of those layers on; without, the solver decides for every layer. Solvers
  do not know of it, and may save memory that is there then; but with variant=paper they do where it is all layers.
* What no step has measured yet, A_i of a layer that was always rematerialised, is bounded by its backward's peak.
* The rates of collectives and of all but copies and CPU Adam are those of a hardware profile (option hardware), not of the run.
* On several ranks frozen bundles without lazy prefetching stay whole. A shard rests beside the gathered copy, not in it.
* Layers that the host has no memory for are on the device for good, with their states, and no switch moves them: the paper has
  all of the optimizer on the host.
* Collectives have a queue of their own without a link between GPUs too, where figure 8 has them in the PCI-E stream. They share
  the host link's bandwidth there, and the paper's cost model (PAPER_WITHOUT_LINK) has them one after the other.

Where the defaults do, for more speed, and variant=paper does not

* Copies of each direction have a lane of their own.
* Economical mode fetches a layer as the layer itself begins. That saves the memory of what is coming, not of what is leaving,
  and nothing is asynchronous about it: compute stands still for every such copy. So solver=on without variant=paper is not the
  paper's "w/o H3T", and is slower. The other mode fetches where the layer before begins, behind its post-process.
* On one rank there is nobody to gather from: partition means that parameters live on the host between forward and backward.
* Segment synchronisation, a barrier where a segment of a layer with the switch on ends (compute, copies, collectives wait for
  each other, the host's updates go on), saves no memory here. Dynamic programming has it on everywhere because its cost model
  needs that, not its plan. So `best` runs each assignment without any; a solver asked for by name is run as solved.
* `best` is the fastest of dp, greedy and manual by the simulator, each under the rules of the substrate (`costs.SUBSTRATE`).
* The rates of copies and updates are the hardware profile's too.
* The cost model counts no copy for what rests on the device, though it is moved once a step behind its update (figure 3a). The
  simulator and the run have those copies.
* Updates run ahead of the norm where host memory allows (option run_ahead), or begin during backward (nonfinite=stop).
* The optimizer of the first layers, with a quarter, a half or all parameters, is on the device if the step is shorter so
  (`placement.py`). Of best's solvers dp, the slowest, sees only the share that the others found fastest. variant=global-offload
  has none there.

Where variant=paper still departs

* Section 3.2.3 has parameter optimization in the calculation stream. Here it begins behind the last backward, when the norm is
  known, first layers' first, in a lane of its own: the next forward waits for its own layers' updates alone.
* The cost model counts the copy of a shard that rests (`costs.renewal`), as time of its own behind all else, since the first
  segment of the next step waits for it. The paper does not say; by its table 6, where lazy prefetching is on in 8 % of the
  layers, it may count nothing. Figures of the paper that are drawn by `costs.PAPER` alone do not count it.
* Without synchronisation a layer's preparation waits for its segment only as far as it needs room that is freed there.
* The profiler's steps, S of them, have every switch on but synchronisation. That S more steps are skipped, and S timed
  (appendix C.3), is the harness's: `--warmup 20 --steps 30` with the ten steps of profile_steps. Fewer are allowed, for tests.
* The profiler times copies and updates from its second step on, which is the first that has a plan; whole lanes, not layer by
  layer. In a forecast their rates are the hardware profile's.
* Which reduction is used (option reduction) is open; BMTrain's is NCCL's own, `native`.

| rule of the paper | `paper` | default | measured difference |
|---|---|---|---|
| one PCI-E stream, both ways (3.2.3) | Plan.one_copy_queue | a lane each way | - |
| layer prepared a segment ahead in either mode (3.2.3, A.2) | PaperCompiler | at its own ENTER if economical | - |
| post-process first if economical, else preparation (A.2) | PlannedOperation.first | post-process first | - |
| a shard that rests stays when partition releases (3.2.2) | on one rank too, as a whole | of several ranks | - |
| segment synchronisation on for dp (3.3.2) | as solved | left out by best | - |
| a shard that rests comes behind its update (figure 3a) | Rules.renews | not in the cost model | - |
| solver: Algorithm 4, m = 128, by the paper's machine (3.3.2, B.3, C.3) | dp, `costs.PAPER` | best, `costs.SUBSTRATE` | - |
| optimizer of all layers on the host (3.2.2) | as far as there is room | not the first, if faster so | 0.93x of ps-4b |
| optimize behind the last backward (3.1) | run_ahead=false, nonfinite=skip | run_ahead=true | - |
| S = 10 steps profiled (C.3) | profile_steps=10 | the same | - |
| copy and update times from the profiler (3.3.1) | Plan.times_lanes, `rates.py` | option hardware | - |
| basic solver: Algorithm 3 (B.3) | solver=basic-dp | the same | - |
| w/o H3T: every switch on (4.1) | solver=on | solver=on, economical as above | - |
| all but the optimizer's place, ps-4b in 20 GiB on one H200 (docs/results.md) | 1.549 s a step | 1.095 s a step | 0.69x |
| the same, opt-6.7b in 40 GiB on one H200 (the same page) | 2.068 s a step | 1.858 s a step | 0.91x |
| all of these, ps-4b, on two H200 | 1.549 s a step | 1.015 s a step | not of one machine |
| all of these, opt-6.7b, on two H200 | 2.068 s a step | 1.422 s a step | not of one machine |
"""

from systems.strategies.h3t.strategy import H3T

STRATEGY = H3T
