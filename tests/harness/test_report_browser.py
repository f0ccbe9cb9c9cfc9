"""The page of `harness report` in a browser, at the width of a phone and of a desk: Chromium, where there is one.

It is started anew for each look, without a network. What is measured in the page is measured by a script in a copy of it whose
policy lets that one script in; the page itself has none.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from harness import cli
from harness.report.page import SECTIONS
from tests.harness.test_report import HOSTILE, RESULTS, hostile_page

CHROMIUM = shutil.which("chromium")
WIDTHS = (400, 1400)
HEIGHT = 1000
COLOURS = 100  # a page with text has more, because edges of letters are smoothed
LIMIT_S = 100
COMPLAINT = re.compile(r":CONSOLE[:(\d]|Refused to|Uncaught|Content.Security.Policy", re.IGNORECASE)
MEASURE = """
const all = [...document.querySelectorAll('svg :is(rect, polyline, line)')];
const open = [...document.querySelectorAll('details')]; open.forEach(each => each.open = true);
const seen = all.map(each => [each.ownerSVGElement.getAttribute('aria-label') || '', each.getBoundingClientRect()]);
const report = {
  width: innerWidth, page: document.documentElement.scrollWidth, height: document.documentElement.scrollHeight,
  shapes: seen.length, empty: seen.filter(([, box]) => !(box.width > 0 || box.height > 0)).map(([name]) => name),
  svgs: document.querySelectorAll('svg').length,
  bare: [...document.querySelectorAll('svg')].filter(each => !each.querySelector('rect, polyline, line')).length,
  small: [...document.querySelectorAll('p, td, th, li')].map(each => parseFloat(getComputedStyle(each).fontSize)),
  headings: [...document.querySelectorAll('h2[id]')].map(each => each.id),
  policies: document.querySelectorAll('meta[http-equiv]').length,
};
const told = parent.document.createElement('pre'); told.id = 'measured'; told.textContent = JSON.stringify(report);
parent.document.body.append(told);
"""
SHOWN = """
const told = parent.document.createElement('pre'); told.id = 'measured';
told.textContent = JSON.stringify({text: document.body.innerText, title: document.title, hit: window.hit ?? null});
parent.document.body.append(told);
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: apt-get install chromium"),
]


def browse(page: Path, profile: Path, width: int, *flags: str) -> subprocess.CompletedProcess[str]:
    """Chromium's look at a file, its profile in a folder of its own."""
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command += ["--v=0", f"--user-data-dir={profile}", f"--window-size={width},{HEIGHT}", *flags, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    complaints = [line for line in done.stderr.splitlines() if COMPLAINT.search(line)]
    assert not complaints, complaints
    return done


def with_script(page: str, script: str) -> str:
    """A copy in which this one script runs."""
    assert page.count("default-src &#39;none&#39;;") == 1 and page.count("</body>") == 1
    allowed = page.replace("default-src &#39;none&#39;;", "default-src &#39;none&#39;; script-src &#39;nonce-test&#39;;")
    return allowed.replace("</body>", f'<script nonce="test">{script}</script></body>')


def measured(page: str, script: str, folder: Path, width: int) -> dict[str, Any]:
    """In a frame of this width: no window of Chromium's is narrower than 500 pixels."""
    inner = html.escape(with_script(page, script))
    copy = folder / f"copy-{width}.html"
    copy.write_text(f'<!doctype html><body><iframe width={width} height={HEIGHT} frameborder=0 srcdoc="{inner}"></iframe>')
    dumped = browse(copy, folder / "profile", width, "--dump-dom").stdout
    found = re.search(r'<pre id="measured">(.*?)</pre>', dumped, flags=re.DOTALL)
    assert found is not None, dumped[-500:]
    told: dict[str, Any] = json.loads(html.unescape(found[1]))
    return told


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    assert cli.main(["report", "--results", str(RESULTS), "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_drawn_without_a_complaint(page: Path, width: int, tmp_path: Path) -> None:
    """The first screen: many colours, and neither all paper nor all ink."""
    picture = tmp_path / "screen.png"
    browse(page, tmp_path / "profile", width, f"--screenshot={picture}")
    pixels = np.asarray(imread(picture))[:, :, :3]
    assert pixels.shape[:2] == (HEIGHT, width)
    colours, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
    assert len(colours) > COLOURS and counts.max() < 0.98 * counts.sum()
    rows = (pixels != pixels[0, 0]).any(axis=(1, 2)).mean()
    assert rows > 0.5, "most lines of the screen are empty"


@pytest.mark.parametrize("width", WIDTHS)
def test_everything_is_in_sight_and_nothing_is_wider_than_the_screen(page: Path, width: int, tmp_path: Path) -> None:
    """With every part that folds away unfolded."""
    told = measured(page.read_text(), MEASURE, tmp_path, width)
    assert told["width"] == width and told["page"] <= width
    assert told["shapes"] > 200 and told["empty"] == [] and told["svgs"] > 50 and told["bare"] == 0
    assert min(told["small"]) >= 11 and told["height"] > 5 * HEIGHT
    assert told["headings"] == list(SECTIONS) and told["policies"] == 1


def test_what_a_record_says_is_not_run(tmp_path: Path) -> None:
    """Not even where the policy of the copy would let a script of the page's own in: it is text, and is seen as such."""
    text = f"{HOSTILE}<script nonce=test>window.hit = 1</script><img src=x onerror='window.hit = 2'>"
    told = measured(hostile_page(text), SHOWN, tmp_path, WIDTHS[0])
    assert told["hit"] is None and "<script nonce=test>window.hit = 1</script>" in told["text"]
    assert "alert" not in told["title"]


def test_a_complaint_would_be_seen(tmp_path: Path) -> None:
    """A page that breaks its own policy, and one that is too wide, are found by the same looks."""
    broken = tmp_path / "broken.html"
    broken.write_text(hostile_page("x").replace("</body>", "<script>window.hit = 1</script></body>"))
    with pytest.raises(AssertionError, match="script"):
        browse(broken, tmp_path / "profile", WIDTHS[0], "--dump-dom")
    wide = hostile_page("x").replace("<main>", "<main><pre>" + "x" * 500 + "</pre>")
    assert measured(wide, MEASURE, tmp_path, WIDTHS[0])["page"] > WIDTHS[0]
