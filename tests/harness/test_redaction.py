"""What never gets into a record, and what never gets into a spreadsheet's cell."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from harness import launch
from harness.record import Record, build, to_json
from harness.redaction import SHORTEST, without_secrets
from harness.spreadsheet import BEGIN_A_FORMULA, write_csv
from tests.harness.conftest import make_record, make_spec
from tests.harness.processes import LIGHT

SECRET = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=SHORTEST + 4)


@settings(max_examples=100, deadline=None)
@given(secret=SECRET.filter(lambda text: len(text.strip()) >= SHORTEST + 4), before=st.text(max_size=3), data=st.data())
@example("f" * 40, "", None)
def test_no_part_of_a_record_keeps_a_secret(secret: str, before: str, data: st.DataObject | None) -> None:
    names = st.sampled_from(["WANDB_API_KEY", "HF_TOKEN", "my_password", "GH_PAT"])
    name = "WANDB_API_KEY" if data is None else data.draw(names)
    told = f"{before}{secret}"
    record = build(
        {
            "run_id": "run", "status": "failed", "started_at": "2026", "spec": make_spec(tag=told, data=told),
            "reason": {"message": told, "log": ["x", told], "advice": [told]},
            "notes": [told], "strategy": {"deep": [{"er": told, told: 1}]},
            "environment": {"variables": {"CC": told}, "versions": {"torch": told}},
            "resolved": {"shape": {"name": told}, "options": {"config": told}, "device_label": told},
            "doubts": [{"code": told, "seen": told, "cause": told, "advice": told}],
        }
    )  # fmt: skip
    cleared = without_secrets(record, {name: secret, "PATH": "/usr/bin"})
    texts = list(_texts(json.loads(to_json(cleared))))
    assert secret.strip() and not any(secret.strip() in text for text in texts)
    assert any(f"<{name}>" in text for text in texts)
    assert Record.model_validate_json(to_json(cleared)) == cleared


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield key
            yield from _texts(item)
    elif isinstance(tree, list):
        for item in tree:
            yield from _texts(item)


@pytest.mark.parametrize("word", ["constant", "unavailable", "interrupted", "resident"])
def test_what_a_record_must_say_is_said_whatever_the_environment_has(word: str) -> None:
    record = make_record(status="unavailable" if word != "interrupted" else word)
    cleared = without_secrets(record, {"API_KEY": word})
    assert (cleared.status, cleared.spec.schedule) == (record.status, record.spec.schedule)
    assert Record.model_validate_json(to_json(cleared)) == cleared


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"])
def test_a_process_that_prints_its_environment_leaves_no_key_in_its_record(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "0123456789abcdef" * 2
    monkeypatch.setattr(launch, "WORKER", LIGHT)
    monkeypatch.setenv(name, key)
    with open(os.devnull, "w") as nowhere:
        record = launch.launch(make_spec(f"prints={name}"), console=Console(file=nowhere))
    assert record.status == "failed" and record.reason is not None
    assert key not in to_json(record)
    assert f"the environment has <{name}>" in record.reason.log
    assert record.reason.log[-1] == f"RuntimeError: <{name}> was refused"


IN_FORM = {
    "https://me:hunter2hunter2@hub.example/repo.git": "hunter2hunter2",
    "cloning https://oauth2:x1@huggingface.co/a/b failed": "oauth2:x1",
    "proxy http://user:p%40ss@10.0.0.1:3128": "p%40ss",
    "postgresql://me:word@db/x": "me:word",
    "GET https://api.example/v1?user=me&api_key=0011223344 -> 401": "0011223344",
    "https://bucket.example/a?X-Amz-Signature=deadbeef&x=1": "deadbeef",
    "https://hub.example/resolve?token=abc#part": "=abc",
    "Invalid token hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "ghp_0123456789abcdefghij0123456789abcdef": "ghp_0123456789abcdef",
    "wandb_v1_0123456789abcdefghij_0123456789": "0123456789abcdefghij",
    "aws AKIAABCDEFGHIJKLMNOP": "AKIAABCDEFGHIJKLMNOP",
}


@pytest.mark.parametrize("told", IN_FORM)
def test_a_secret_is_known_by_its_form_whatever_the_environment_has(told: str) -> None:
    made = make_record(
        status="failed", spec=make_spec(tag=told, data=told), reason={"message": told, "log": ["x", told]}, notes=[told],
        strategy={"deep": [{told: told}]}, environment={"variables": {"http_proxy": told}},
    )  # fmt: skip
    text = to_json(without_secrets(made, {}))
    assert IN_FORM[told] not in text and "<secret>" in text


@pytest.mark.parametrize(
    "told",
    [
        "https://huggingface.co/facebook/opt-125m?rev=main", "me@example.org", "file:///home/me/a@b", "the token is 5 long",
        "http://localhost:29400/a@b", "give --token=..., or set HF_TOKEN", "a key=value", "hf_transfer", "sk-learn",
    ],
)  # fmt: skip
def test_what_is_no_secret_stands(told: str) -> None:
    made = make_record(status="failed", reason={"message": told})
    assert without_secrets(made, {}) == made


def test_the_environment_of_a_record_is_of_names_that_hold_no_keys() -> None:
    from harness import environment as described
    from harness.redaction import SECRET_NAME

    assert [name for name in described.VARIABLES if SECRET_NAME.search(name)] == []


@given(st.lists(st.tuples(st.text(max_size=6), st.none() | st.integers() | st.text(max_size=6)), min_size=1, max_size=3))
@example([("=1+1", "@SUM(A1)"), (" =1+1", "-2+3"), ("\t=1", "\r=1")])
def test_no_cell_of_a_csv_file_is_a_formula(rows: list[tuple[str, Any]]) -> None:
    path = Path(os.environ.get("PYTEST_TMP", "/tmp")) / f"says-{os.getpid()}.csv"
    rows = [(name.replace("\0", ""), other.replace("\0", "") if isinstance(other, str) else other) for name, other in rows]
    try:
        write_csv(path, [{"tag": name, "=other": other} for name, other in rows])
        with path.open(newline="", encoding="utf-8") as file:
            head, *read = list(csv.reader(file))
    except UnicodeEncodeError:
        return
    finally:
        path.unlink(missing_ok=True)
    assert head == ["tag", "'=other"]
    for (name, other), (told, number) in zip(rows, read, strict=True):
        assert not told.lstrip().startswith(BEGIN_A_FORMULA) and not told.startswith(BEGIN_A_FORMULA)
        assert told.removeprefix("'") in (name, name.removeprefix("'"))
        if isinstance(other, str):
            assert not number.lstrip().startswith(BEGIN_A_FORMULA) and not number.startswith(BEGIN_A_FORMULA)
        else:
            assert number == ("" if other is None else str(other))


