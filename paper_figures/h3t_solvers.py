"""H3T's case study (table 6), solver times (table 5), curves over batch size (figure 6) and GPT-3 on 64 A100 (appendix D.1).

    python -m paper_figures.h3t_solvers [table5 | table6 | figure6 | gpt3]

Simulated by the cost model of the solvers under the paper's rules, on the hardware profiles of its three environments. Nothing
is measured: layers are reckoned from their shapes. The paper's own numbers stand beside ours.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from harness.figures import FigureSpec
from harness.output import counted, say
from harness.paper_table import ComputedCell, FigureCell, FigureColumn, PaperTable, PrintedCell, SimulatedCell, Value, table
from models import registry as models_registry
from models.shape import ModelShape
from paper_figures.kept import ForecastFound, simulated
from paper_figures.recorded import with_plan_errors
from systems.errors import BudgetError
from systems.planning import hardware
from systems.planning.clock.rates import Rates
from systems.planning.plan import LaneKind
from systems.strategies.h3t.costs import PAPER, PAPER_WITHOUT_LINK, LayerCosts, ModelCosts
from systems.strategies.h3t.dynamic import pruned_dp
from systems.strategies.h3t.evaluation import all_on, evaluate
from systems.strategies.h3t.solvers import greedy_solver, manual_solver, random_solver
from systems.strategies.h3t.switches import SYNCHRONISED, Assignment

SHOWS = {
    "h3t-table5": "time of the solvers",
    "h3t-table6": "case study: share of layers with a switch on",
    "h3t-figure6": "the solvers, by batch and environment",
    "h3t-gpt3": "appendix D.1: GPT-3 175B on 64 A100",
}
GB = 10**9
ITEM = 2  # bytes of a parameter and of an activation's element
ADAM_BYTES = 28  # of host memory traffic, a parameter
SEQ_LEN, T_RAND = 512, 10_000
SOLVERS = ("manual", "random", "greedy", "DP")
TABLE5 = ((12.0, 0.6, 0.1), (4.7, 0.9, 0.2), (2.8, 0.6, 0.1), (13.9, 0.6, 0.1))
"""DP, greedy and random, minutes."""
TABLE6 = ((90, 8, 92, 21), (0, 0, 98, 0), (88, 90, 88, 81), (50, 50, 65, 56), (0, 0, 100, 0))
"""Per cent of the layers."""
SHOWN = ("partition", "lazy_prefetch", "rematerialise", "offload_hidden")


@dataclass(frozen=True)
class SolverCase:
    """global_batch: sequences of all GPUs. budget: the paper's M, bytes. Factors: of the paper's manual slow-downs."""

    model: str
    environment: str
    global_batch: int
    budget: int
    host_link_factor: float = 1.0
    compute_factor: float = 1.0


def ffn_and_heads(shape: ModelShape) -> tuple[int, int]:
    assert shape.ffn_size is not None and shape.num_heads is not None, "the paper's models say both"
    return shape.ffn_size, shape.num_heads


def layer_parameters(shape: ModelShape) -> int:
    """Of one block: attention's four square matrices, the two of the feed-forward, biases and norms."""
    hidden, (ffn, _) = shape.hidden_size, ffn_and_heads(shape)
    return 4 * hidden * hidden + 2 * hidden * ffn + 9 * hidden + ffn


def model_costs(cell: SolverCase) -> ModelCosts:
    """Reckoned, not measured. Attention is not fused (section C.3): its scores and probabilities are part of A_i."""
    shape, profile = models_registry.resolve(cell.model), hardware.load(cell.environment)
    ranks = profile.devices
    tokens = cell.global_batch * SEQ_LEN // ranks
    parameters = layer_parameters(shape)
    products = 2 * tokens * (parameters + 2 * SEQ_LEN * shape.hidden_size)
    rate = profile.matmul_rate("fp16") * cell.compute_factor
    hidden = tokens * shape.hidden_size * ITEM
    ffn, heads = ffn_and_heads(shape)
    scores = tokens * SEQ_LEN * heads * ITEM
    kept = 8 * hidden + 2 * tokens * ffn * ITEM + 2 * scores
    size = parameters * ITEM
    rates = Rates(profile, ranks)
    link = profile.device_link_bytes_per_s is not None
    copies = cell.host_link_factor

    def copy_s(nbytes: float, rate: float) -> float:
        return nbytes / (rate * copies) + profile.copy_overhead_s(nbytes)

    def collective_s(lane: LaneKind) -> float:
        return size * (ranks - 1) / ranks / (rates.link.rate(lane) * (1.0 if link else copies))

    layer = LayerCosts(
        "block",
        forward_s=products / rate,
        backward_s=2 * products / rate,
        prefetch_s=copy_s(size / ranks, rates.h2d),
        gather_s=collective_s(LaneKind.GATHER),
        reduce_s=collective_s(LaneKind.REDUCE),
        offload_s=copy_s(size / ranks, rates.d2h),
        hidden_out_s=copy_s(hidden, rates.d2h),
        hidden_in_s=copy_s(hidden, rates.h2d),
        parameter_bytes=size,
        resting_bytes=size // ranks,
        intermediate_bytes=kept,
        hidden_bytes=hidden,
        forward_bytes=2 * hidden + scores,
        backward_bytes=3 * hidden + kept + scores + size,
        lingering_bytes=size,
    )
    rows = shape.vocab_size * shape.hidden_size
    head_s = 6 * tokens * rows / rate
    logits = tokens * shape.vocab_size * (ITEM + 4)
    update_s = models_registry.parameter_count(shape) / ranks * ADAM_BYTES / rates.cpu_adam
    model = ModelCosts(
        (layer,) * shape.num_layers,
        PAPER if link else PAPER_WITHOUT_LINK,
        turn_s=head_s,
        fixed_s=update_s,
        start_bytes=2 * rows * ITEM + logits,
        fixed_bytes=rows * ITEM // ranks,
    )
    last = replace(layer, gap_bytes=2 * rows * ITEM + logits)
    return replace(model, layers=(*model.layers[:-1], last))


def solved(solver: Callable[[], Assignment]) -> tuple[Assignment | None, float]:
    """None where nothing fits. Seconds that it took."""
    began = time.perf_counter()
    try:
        found: Assignment | None = solver()
    except BudgetError:
        found = None
    return found, time.perf_counter() - began


def dp(cell: SolverCase) -> Callable[[], Assignment]:
    return lambda: pruned_dp(model_costs(cell), cell.budget)


def greedy(cell: SolverCase) -> Callable[[], Assignment]:
    return lambda: greedy_solver(model_costs(cell), cell.budget, choices=SYNCHRONISED)


def solvers(costs: ModelCosts, budget: int) -> list[Callable[[], Assignment]]:
    """Manual, random, greedy, DP: as the paper's figure has them."""
    return [
        lambda: manual_solver(costs, budget),
        lambda: random_solver(costs, budget, samples=T_RAND, seed=0),
        lambda: greedy_solver(costs, budget),
        lambda: pruned_dp(costs, budget),
    ]


def table5() -> PaperTable:
    """Minutes in the paper, seconds here."""
    settings = (("bert-13b", 1024, 25), ("bert-100b", 1024, 25), ("bert-13b", 4096, 25), ("bert-13b", 1024, 100))
    rows: list[list[FigureCell]] = []
    for (model, batch, budget), theirs in zip(settings, TABLE5, strict=True):
        cell = SolverCase(model, "h3t-a100-40g-x64", batch, budget * GB)
        costs = model_costs(cell)
        times = [solved(solver)[1] for solver in reversed(solvers(costs, cell.budget)[1:])]
        printed = [PrintedCell(each, "table 5") for each in theirs]
        rows.append([model, batch, f"{budget} GB", *printed, *map(ComputedCell, times)])
    names = ("DP", "greedy", "random")
    columns = [FigureColumn("model"), FigureColumn("batch"), FigureColumn("M")]
    columns += [FigureColumn(f"{name} min", "paper") for name in names]
    columns += [FigureColumn(f"{name} s", "computed") for name in names]
    remark = "The paper's solvers take minutes, in Python; computed: ours, timed as this is made, on the CPU that makes it."
    return table("H3T table 5: time of the solvers", columns, rows, remark)


def table6() -> PaperTable:
    """Switch-on ratios of BERT-1.8B, batch 128, 8 x 2080 Ti, M = 8 GB."""
    plain = SolverCase("bert-1.8b", "h3t-2080ti-10g-x8", 128, 8 * GB)
    cases = (
        ("/", dp(plain)),
        ("PCI-E speed x0.1", dp(replace(plain, host_link_factor=0.1))),
        ("FPU speed x0.1", dp(replace(plain, compute_factor=0.1))),
        ("M <- 25", dp(replace(plain, budget=25 * GB))),
        ("solver <- greedy", greedy(plain)),
    )
    rows: list[list[FigureCell]] = []
    for (name, solver), theirs in zip(cases, TABLE6, strict=True):
        found, _ = solved(solver)
        row: list[FigureCell] = [name, *(PrintedCell(f"{each} %", "table 6") for each in theirs)]
        if found is None:
            rows.append([*row, *[None] * (len(SHOWN) + 1)])
            continue
        ratios = [f"{100 * found.ratios()[each]:.0f} %" for each in SHOWN]
        shown: tuple[Value, ...] = (*ratios, found.runtime_s)
        rows.append([*row, *(SimulatedCell(each, plain.environment) for each in shown)])
    names = ("partition", "lazy prefetching", "rematerialisation", "offloading")
    columns = [FigureColumn("case"), *(FigureColumn(each, "paper") for each in names)]
    columns += [FigureColumn(each, "simulated") for each in (*names, "step s")]
    remark = (
        "Ours is near the paper in rematerialisation, and where link or arithmetic is slow. Elsewhere it partitions and "
        "prefetches lazily far more: a copy that hides behind compute costs nothing here, and what it saves is taken."
    )
    return table("H3T table 6: share of layers with the switch on", columns, rows, remark)


ENVIRONMENTS = (
    ("h3t-2080ti-10g-x8", 8 * GB, (("bert-1.8b", (64, 128, 256, 512)), ("bert-6b", (8, 16, 32)))),
    ("h3t-a100-40g-x8", 28 * GB, (("bert-6b", (128, 256, 512)), ("bert-13b", (128, 256, 512)))),
    ("h3t-a100-40g-x64", 28 * GB, (("bert-13b", (1024, 2048, 4096)), ("bert-100b", (1024, 2048)))),
)


def ask_every_solver(cases: Sequence[SolverCase]) -> Iterator[tuple[SolverCase, ForecastFound]]:
    """Sequences a second of all GPUs by solver, of those that find a plan."""
    for cell in cases:
        found = {name: solved(solver)[0] for name, solver in zip(SOLVERS, solvers(model_costs(cell), cell.budget), strict=True)}
        yield cell, ForecastFound(None, None, {name: cell.global_batch / one.runtime_s for name, one in found.items() if one})


def figure6(*, fresh: bool = False) -> PaperTable:
    """The paper gives curves without numbers."""
    cases = [
        SolverCase(model, environment, batch, budget)
        for environment, budget, lines in ENVIRONMENTS
        for model, batches in lines
        for batch in batches
    ]
    kept = simulated("h3t-figure6", cases, fresh=fresh, ask=ask_every_solver)
    rows: list[list[FigureCell]] = []
    for cell in cases:
        found = kept.of(cell)
        speeds = [None if found is None else found.statistics.get(name) for name in SOLVERS]
        shown = [None if speed is None else SimulatedCell(speed, cell.environment) for speed in speeds]
        rows.append([cell.environment, cell.model, cell.global_batch, None, *shown])
    columns = [FigureColumn("environment"), FigureColumn("model"), FigureColumn("batch"), FigureColumn("sequences/s", "paper")]
    columns += [FigureColumn(f"{name} sequences/s", "simulated") for name in SOLVERS]
    remarks = ("The paper's curves are in an image alone.", "An empty simulated cell: the solver finds no plan in M.")
    return table("H3T figure 6: the solvers, by batch", columns, rows, kept.remark("h3t-figure6"), *remarks)


def gpt3() -> PaperTable:
    """Appendix D.1: GPT-3 175B, batch 512 on 64 A100, about 11.1 GB a device at a minimum and 40.8 s a step."""
    cell = SolverCase("gpt3-175b", "h3t-a100-40g-x64", 512, 28 * GB)
    costs = model_costs(cell)
    least = evaluate(costs, all_on(costs))
    fastest, _ = solved(lambda: pruned_dp(costs, cell.budget))
    ours: list[Value] = [int(least.memory_bytes[0]) / GB, float(least.runtime_s[0])]
    theirs: list[Value | None] = [None, None] if fastest is None else [fastest.memory_bytes / GB, fastest.runtime_s]
    rows: list[list[FigureCell]] = []
    for name, said, minimal, best in zip(("device memory, GB", "step s"), (11.1, 40.8), ours, theirs, strict=True):
        quick = None if best is None else SimulatedCell(best, cell.environment)
        rows.append([name, PrintedCell(said, "section D.1"), SimulatedCell(minimal, cell.environment), quick])
    columns = (FigureColumn(""), FigureColumn("number", "paper"), FigureColumn("minimal plan", "simulated"))
    title = "H3T, appendix D.1: GPT-3 175B on 64 A100, batch 512, 512 tokens"
    return table(title, (*columns, FigureColumn("fastest in 28 GB", "simulated")), rows, "Both printed numbers are 'about'.")


TABLES: Mapping[str, Callable[[], PaperTable]] = {"table5": table5, "table6": table6, "figure6": figure6, "gpt3": gpt3}


def tables(name: str, asked: FigureSpec) -> Iterator[PaperTable]:
    made = figure6(fresh=asked.fresh) if name == "h3t-figure6" else TABLES[name.removeprefix("h3t-")]()
    yield made if name == "h3t-table5" else with_plan_errors(made, asked.results, "h3t")


def main(arguments: list[str]) -> int:
    console = Console(width=140)
    unknown = [each for each in arguments if each not in TABLES]
    if unknown:
        console.print(f"there is no {unknown[0]}: use {', '.join(TABLES)}, or nothing for all", markup=False)
        return 2
    names = arguments or list(TABLES)
    for name in counted(names, len(names), str):
        say(TABLES[name]().markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
