"""Angel-PTM's tables 3 (hardware) and 4 (models), beside the profile and the shapes that are shipped: labels against counts."""

from __future__ import annotations

from collections.abc import Iterator

from harness.figures import FigureSpec
from harness.paper_table import ComputedCell, FigureCell, FigureColumn, PaperTable, PrintedCell, table
from models import registry as models_registry
from systems.planning import hardware

SHOWS = {
    "angel-table3": "hardware of a server, and the profile of it",
    "angel-table4": "models: labels against the parameters that their shapes have",
}
PROFILE = "angel-a100-40g-x8"
TABLE4: tuple[tuple[str, int, int, int, int, int | None, str], ...] = (
    ("GPT3-1.7B", 24, 24, 2304, 9216, None, "angel-1.7b"),
    ("GPT3-13B", 40, 40, 5140, 20506, None, "angel-13b"),
    ("GPT3-28B", 26, 128, 8192, 32768, None, "angel-28b"),
    ("GPT3-30B", 64, 36, 8192, 32768, None, "angel-30b"),
    ("GPT3-55B", 68, 128, 8192, 32768, None, "angel-55b"),
    ("GPT3-120B", 64, 96, 12288, 49152, None, "angel-120b"),
    ("GPT3-175B", 70, 112, 14336, 57344, None, "angel-175b"),
    ("T5-1.4B", 16, 16, 1024, 16384, None, "t5-1.4b"),
    ("T5-27B", 28, 64, 4096, 16384, None, "t5-27b"),
    ("T5-58B", 60, 64, 4096, 16384, None, "t5-58b"),
    ("T5-MoE-1.2T", 16, 16, 1024, 16384, 2304, "t5-moe-1.24t"),
)
"""Label, layers, heads, d_model, d_ffn, experts, and the name that it has here."""


def tables(name: str, asked: FigureSpec) -> Iterator[PaperTable]:
    yield _hardware() if name == "angel-table3" else _models()


def _hardware() -> PaperTable:
    profile = hardware.load(PROFILE)
    disk, read, network = profile.disk_bytes, profile.disk_read_bytes_per_s, profile.network_bytes_per_s
    assert disk is not None and read is not None and network is not None
    text, own = "table 3", "section 6.1"
    rows: list[list[FigureCell]] = [
        ["CPU", PrintedCell("4 x AMD EPYC 7K62 48-Core Processor", text), None],
        ["CPU memory", PrintedCell("32 x 32GB 2933MHz DDR4", text), ComputedCell(f"{profile.host_memory_bytes.value:,} bytes")],
        [
            "GPU",
            PrintedCell("8 x NVIDIA Tesla A100 Tensor Core GPU", text),
            ComputedCell(f"{profile.devices_per_node.value} x {profile.device_name}"),
        ],
        ["GPU memory", PrintedCell("8 x 40GB HBM2", text), ComputedCell(f"8 x {profile.device_memory_bytes.value:,} bytes")],
        ["SSD", PrintedCell("11TB", text), ComputedCell(f"{disk.value:,} bytes")],
        ["SSD peak bandwidth", PrintedCell("3.5GB/s", own), ComputedCell(f"{read.value:,.0f} bytes/s")],
        ["PCIe bandwidth", PrintedCell("32GB/s", own), ComputedCell(f"{profile.h2d_bytes_per_s.value:,.0f} bytes/s")],
        ["RoCE", PrintedCell("16 x 12.5 GB/s", own), ComputedCell(f"{network.value:,.0f} bytes/s")],
    ]
    columns = (FigureColumn("part"), FigureColumn("as printed", "paper"), FigureColumn(f"profile {PROFILE}", "computed"))
    return table(
        "Angel-PTM table 3: hardware of one GPU server",
        columns,
        rows,
        f"The profile's other numbers, with the source of each: harness ls hardware {PROFILE}.",
        "32 modules fill two sockets of this processor; the table says four processors, section 5 two.",
    )


def _models() -> PaperTable:
    rows: list[list[FigureCell]] = []
    for label, layers, heads, width, inner, experts, here in TABLE4:
        row: list[FigureCell] = [label, *(PrintedCell(each, "table 4") for each in (layers, heads, width, inner))]
        row.append(None if experts is None else PrintedCell(experts, "table 4"))
        shape = models_registry.resolve(here)
        count = models_registry.parameter_count(shape)
        assert count is not None
        rows.append(
            [*row, ComputedCell(here), ComputedCell(f"{count / 1e9:.1f}B"), (shape.notes and ComputedCell(shape.notes)) or None]
        )
    columns = [
        FigureColumn("model"),
        *(FigureColumn(name, "paper") for name in ("layers", "heads", "d_model", "d_FFN", "experts")),
    ]
    columns += [FigureColumn(name, "computed") for name in ("name here", "parameters of the shape", "notes")]
    return table(
        "Angel-PTM table 4: models for evaluation",
        columns,
        rows,
        "Section 6.2 takes 28B and 55B, 26 and 68 layers of one width, as 96.4 % more; by their shapes it is 158 % more.",
    )
