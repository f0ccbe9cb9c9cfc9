"""Lists and wrong names take no seconds: what is slow to import is not imported for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.option_texts import option_texts
from systems import registry
from tests.harness.conftest import make_record
from tests.harness.processes import ROOT, environment

SLOW = ("torch", "transformers", "pandas", "matplotlib", "tyro")
CODE = f"""
import sys
from harness import cli
code = cli.main(sys.argv[1:])
print([name for name in {SLOW!r} if name in sys.modules])
sys.exit(code)
"""
RUN = ("run", "--system", "elixir", "--model", "opt-tiny", "--device", "cpu")
PLAN = ("plan", "--system", "elixir", "--model", "opt-tiny", "--hardware", "h100-80g-x1")


def called(*arguments: str, cwd: Path = ROOT) -> tuple[int, list[str], list[str]]:
    """Exit code, lines on stdout, the last of which names what was imported, and lines on stderr."""
    command = [sys.executable, "-c", CODE, *arguments]
    path = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cwd, env=environment(more=path), capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ls", "systems"), "elixir"),
        (("ls", "systems", "h3t"), "--option profile_steps="),
        (("ls", "systems", "deepspeed-twinflow"), "--option ratio="),
        (("ls", "models"), "opt-1.3b"),
        (("ls", "models", "t5-11b"), "11307321344"),
        (("ls", "models", "--family", "bert"), "bert-13b"),
        (("ls", "hardware"), "h100-80g-x1"),
        (("ls", "hardware", "h100-80g-x1"), "h2d_bytes_per_s"),
        (("ls", "figures"), "patrickstar-table4"),
        (("ls", "systems", "--json"), '"name": "angel-ptm"'),
    ],
)
def test_lists_import_nothing_slow(arguments: tuple[str, ...], said: str) -> None:
    code, out, err = called(*arguments)
    assert (code, err, out[-1]) == (0, [], "[]")
    assert any(said in line for line in out)


def test_neither_does_the_list_of_runs(tmp_path: Path) -> None:
    from harness import store

    store.write(make_record(tag="x"), tmp_path / "runs")
    code, out, err = called("ls", "runs", "--sort", "step", cwd=tmp_path)
    assert (code, len(out), out[-1]) == (0, 3, "[]")
    assert err == ["1 of 1 runs in runs"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "--system", "elxir", "--model", "opt-tiny"), "unknown system 'elxir': did you mean elixir?"),
        (("run", "--system", "elixir", "--model", "opt-tinny"), "unknown model 'opt-tinny': did you mean opt-tiny"),
        ((*RUN, "--option", "prefech=2"), "unknown option of elixir 'prefech': did you mean prefetch?"),
        ((*RUN, "--option", "prefetch=some"), "--option prefetch=some: input should be a valid integer"),
        ((*RUN, "--set", "layers=3"), "opt-tiny has no field 'layers' to set"),
        (("compare", "--system", "elixir:prefech=2", *RUN[1:]), "unknown option of elixir 'prefech'"),
        (("compare", "--system", "h3t", "--system", "resident", "--model", "nope"), "unknown model 'nope'"),
        ((*PLAN[:2], "elxir", *PLAN[3:]), "unknown system 'elxir': did you mean elixir?"),
        ((*PLAN[:4], "opt-tinny", *PLAN[5:]), "unknown model 'opt-tinny'"),
        ((*PLAN[:6], "h100"), "unknown hardware profile 'h100': did you mean h100-80g-x"),
        ((*PLAN, "--option", "prefech=2"), "unknown option of elixir 'prefech'"),
        (("max-scale", "--system", "elixir", "--family", "optt"), "--family: unknown family 'optt': did you mean opt"),
        (("max-scale", "--system", "elixir", "--model", "nope"), "unknown model 'nope'"),
        (("max-batch", "--system", "elixir", "--model", "nope"), "unknown model 'nope'"),
        (("profile", "--devise", "cpu"), "unknown flag '--devise': did you mean --device"),
        (("ls", "systems", "elxir"), "unknown system 'elxir': did you mean elixir?"),
        (("ls", "models", "opt-tinny"), "unknown model 'opt-tinny'"),
        (("ls", "models", "--family", "optt"), "unknown family 'optt'"),
        (("ls", "hardware", "h100"), "unknown hardware profile 'h100'"),
        (("ls", "runs", "--status", "okay"), "--status okay: input should be 'ok'"),
        (("ls", "runs", "--sort", "size"), "--sort size: input should be 'time', 'step' or 'tokens/s'"),
        (("ls", "systems", "elixir", "h3t"), "unexpected argument 'h3t'"),
        (("ls", "systems", "--json=yes"), "--json takes no value"),
        (("tables", "--json"), "unknown flag '--json'"),
    ],
)
def test_wrong_names_are_found_without_importing_what_is_slow(arguments: tuple[str, ...], said: str) -> None:
    code, out, err = called(*arguments)
    assert (code, out, len(err)) == (2, ["[]"], 1)
    assert said in err[0]


@pytest.mark.parametrize("name", registry.find())
def test_a_face_is_what_the_system_has(name: str) -> None:
    """Of those here that load."""
    system, face = registry.get(name), registry.face(name)
    assert (face.name, face.summary, face.abilities) == (system.name, system.summary, system.abilities)
    assert face.Options is system.Options


@pytest.mark.parametrize("name", registry.find())
def test_every_option_says_what_it_means(name: str) -> None:
    options = registry.face(name).Options
    texts = option_texts(options)
    assert [option for option in options.model_fields if not texts.get(option)] == []
    assert all(": " not in text.split(" ")[0] for text in texts.values())
