"""The folder is the registry; near names, options and sizes in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, TypeAdapter

from systems import registry
from systems.messages import one_line
from systems.sizes import Size, SizeOrUnlimited, format_need, format_size, parse_size
from systems.system import Abilities


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    chunk_bytes: Size = 1 << 20
    variant: Literal["plain", "fancy"] = "plain"
    depth: int = 1


class System:
    name, summary, Options, abilities = "toy", "", Options, Abilities()


def test_every_listed_system_loads_under_its_own_name() -> None:
    listed = list(registry.find())
    assert {"dummy", "resident"} <= set(listed)
    assert [registry.get(name).name for name in listed] == listed


def test_unknown_systems_get_near_names() -> None:
    with pytest.raises(ValueError, match="unknown system 'rezident': did you mean resident"):
        registry.get("rezident")


def folder(root: Path, files: dict[str, str]) -> dict[str, registry.RegistryEntry]:
    for name, text in files.items():
        path = root / "toys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return registry.find(root, {"toys": "SYSTEM"})


def test_what_is_found_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and packages that bind the name; the rest is their business. A broken one takes none of the others down."""
    entries = folder(
        tmp_path,
        {
            "__init__.py": "",
            "good_one.py": TOY.format("good-one"),
            "package/__init__.py": "from toys.package.toy import SYSTEM as SYSTEM\n",
            "package/toy.py": TOY.format("package"),
            "shared.py": "X = 1\n",
            "_private.py": "SYSTEM = 1\n",
            "typo.py": "SYSTEM = (\n",
            "lacking.py": "import no_such_package\nSYSTEM = 1\n",
        },
    )
    assert list(entries) == ["good-one", "lacking", "package", "typo"]
    monkeypatch.syspath_prepend(tmp_path)
    assert [registry.get(name, entries).summary for name in ("good-one", "package")] == ["a toy"] * 2
    with pytest.raises(registry.UnavailableError, match="lacking is unavailable: .*no_such_package"):
        registry.get("lacking", entries)
    with pytest.raises(registry.UnavailableError, match=r"typo is unavailable: SyntaxError.*\(typo\.py, line 1\)"):
        registry.get("typo", entries)


TOY = "from pydantic import BaseModel\nclass Toy:\n    name, summary, Options = '{}', 'a toy', BaseModel\nSYSTEM = Toy()\n"
BROKEN = {
    "SYSTEM = (\n": "SyntaxError",
    "SYSTEM = '\0'\n": "null bytes",
    "SYSTEM = " + "-" * 20_000 + "1\n": "Error",
    "import sys\nSYSTEM = 1\nsys.exit(3)\n": "SystemExit: 3",
    "import no_such_package\nSYSTEM = 1\n": "no_such_package",
    "SYSTEM = 1\n": "SYSTEM.name is None: the file's name makes it 'odd'",
    TOY.format("od"): "SYSTEM.name is 'od': the file's name makes it 'odd'",
    TOY.format("odd").replace("'a toy'", "None"): "SYSTEM.summary is missing",
    TOY.format("odd").replace("BaseModel\nSYSTEM", "dict\nSYSTEM"): "SYSTEM.Options is <class 'dict'>",
}


@pytest.mark.parametrize("text", BROKEN, ids=BROKEN.values())
def test_a_broken_file_is_unavailable_and_nothing_else_is(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = f"broken_{list(BROKEN).index(text)}"
    (tmp_path / package).mkdir()
    for name, source in (("odd", text), ("whole", TOY.format("whole"))):
        (tmp_path / package / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    entries = registry.find(tmp_path, {package: "SYSTEM"})
    assert list(entries) == ["odd", "whole"] and registry.get("whole", entries).summary == "a toy"
    with pytest.raises(registry.UnavailableError) as caught:
        registry.get("odd", entries)
    said = str(caught.value)
    assert said.startswith("odd is unavailable: ") and BROKEN[text] in said and said == one_line(said)


def test_options_are_read_by_the_systems_own_types() -> None:
    options = registry.parse_options(System(), ["chunk-bytes=2MiB", "variant=fancy"])  # type: ignore[arg-type]
    assert options == Options(chunk_bytes=2 << 20, variant="fancy", depth=1)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["dept=3"], "unknown option of toy 'dept': did you mean depth?"),
        (["depth"], "`option` depth: write it as key=value"),
        (["depth=1", "depth=2"], "`option` depth is given twice: 1 and 2"),
        (["depth=deep"], "`options=dict(depth='deep')`: input should be a valid integer"),
        (["variant=fany"], "`options=dict(variant='fany')`: input should be 'plain' or 'fancy'; did you mean fancy?"),
        (["chunk_bytes=4XB"], "`options=dict(chunk_bytes='4XB')`: '4XB' is not a size"),
        (["chunk_bytes=-4"], "`options=dict(chunk_bytes='-4')`"),
    ],
)
def test_wrong_options_are_told_in_one_line(texts: list[str], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        registry.parse_options(System(), texts)  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("40GiB", 40 << 30), ("64MiB", 64 << 20), ("1.5KiB", 1536), ("3 GB", 3 * 10**9), ("123", 123), (7, 7), ("0", 0)],
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_size(text) == size


def test_sizes_are_printed_so_that_they_can_be_read_again() -> None:
    for size in (0, 1, 1023, 1 << 10, 3 << 20, 5 << 30, 7 << 40):
        assert parse_size(format_size(size)) == size
    assert format_size(1536) == "1.50KiB"


def test_a_need_never_looks_like_what_there_is() -> None:
    have = 587_418_632
    assert format_need(have + 1, have) == "560.21MiB (1B more)"
    assert format_need(2 * have, have) == format_size(2 * have)
    assert format_need(have, have) == format_size(have)


def test_only_some_sizes_may_be_unlimited() -> None:
    assert TypeAdapter(SizeOrUnlimited).validate_python("inf") is None
    assert TypeAdapter(SizeOrUnlimited).validate_python("1KiB") == 1024
    with pytest.raises(ValueError, match="is not a size"):
        TypeAdapter(Size).validate_python("inf")
