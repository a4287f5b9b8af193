"""The page of a report: the same from a file as live, self-contained, and rendered by a real
browser.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.evals.tiny import tiny_report

pytest.importorskip(
    "matplotlib", reason="the page is drawn with matplotlib, which comes with the extra eval"
)

from evals.prompt_sets import Item, PromptSet
from evals.report.charts import Charts
from evals.report.html import html_report
from evals.report.palette import COLORS, Palette
from tests.helpers.waiting import HANG

FEW = PromptSet("few", "made up", tuple(Item(f"{n}", ("aba" * n,)) for n in range(2, 7)))
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)

CAPTIONS = [
    "Tau, with 95 % intervals", "Speed to plain decoding", "Serving curve, by concurrency",
    "Speed by concurrency", "Drafts accepted by position, where offered", "Tokens per verify step",
    "Accepted drafts of trees by rank", "Tau by position in the output", "Where the time goes",
]  # fmt: skip
"""All contexts of the tiny report are of one range, so there is no plot of them."""

MEASURE = """
<script>
addEventListener("load", () => {
  const figures = [...document.querySelectorAll("figure svg")].map(svg => {
    const box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map(text => text.getBoundingClientRect());
    const scale = box.width / svg.viewBox.baseVal.width;
    const sizes = [...svg.querySelectorAll("text")].map(
      text => scale * parseFloat(getComputedStyle(text).fontSize));
    return {
      width: box.width, height: box.height, left: box.left, right: box.right,
      texts: texts.length, smallest: Math.min(...sizes),
      outside: texts.filter(t => t.left < box.left - 2 || t.right > box.right + 2
                                 || t.bottom > box.bottom + 2).length,
      marks: svg.querySelectorAll("path").length,
    };
  });
  const nodes = [...document.querySelectorAll(".tree svg g")].map(node => {
    const [text, box] = ["text", "rect"].map(
      name => node.querySelector(name).getBoundingClientRect());
    return {height: box.height, fits: text.left >= box.left && text.right <= box.right};
  });
  const page = document.documentElement;
  const result = {figures, nodes, width: page.clientWidth, scrollWidth: page.scrollWidth};
  document.body.innerHTML = "<pre id=result>" + JSON.stringify(result) + "</pre>";
});
</script>
"""
"""Added to a copy of the page, which has no script of its own and forbids any."""

pytestmark = pytest.mark.slow  # a whole report is measured first


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return tiny_report(
        trees=(12,), sets=(FEW,), num_draft_tokens=(2,), max_tokens=36, repeats=1, warmup=0
    )


@pytest.fixture(scope="module")
def page(report: dict[str, Any]) -> str:
    return html_report(report)


def test_page_of_a_stored_report_is_that_of_the_live_one(report: dict[str, Any], page: str) -> None:
    """Catches dates, random ids, and figures that are not in the JSON."""
    assert html_report(json.loads(json.dumps(report))) == page


def test_page_needs_nothing_from_outside(page: str) -> None:
    """Catches scripts, fonts and images from a network."""
    outside = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert not re.search(r"<(script|link|img|iframe|object)|src=|@import|url\((?!#)", outside)
    assert not re.search(r"href=\"(?!#)", outside)
    assert "tiny &amp; small" in page


def test_incomplete_reports_say_so(report: dict[str, Any], page: str) -> None:
    assert "Incomplete" not in page
    assert "Incomplete" in html_report(report | {"complete": False, "rows": report["rows"][:1]})


def test_page_of_an_evaluation_has_its_plots(report: dict[str, Any]) -> None:
    """Catches a page that only a bench report can fill."""
    row = next(row for row in report["rows"] if row["drafter"] != "none")
    acceptance = row["acceptance"] | {"tau_per_request": row["tau_per_answer"]}
    side = {
        "metrics": {"exact_match,strict-match": {"value": 0.5, "stderr": None}},
        "tokens_per_second": 9.0,
        "acceptance": None,
    }
    task = {
        "task": "a task",
        "num_samples": 4,
        "plain": side,
        "speculative": side | {"acceptance": acceptance},
        "ratio": 1.0,
        "differences": [],
    }
    head = {name: report[name] for name in ("schema_version", "provenance", "complete")}
    page = html_report(
        head | {"schema": "specdec-eval", "settings": {"drafter": "ngram", "k": 2}, "tasks": [task]}
    )
    assert page.count("<svg") == 2
    assert "0.5000" in page


def test_every_plot_has_a_name_and_its_numbers(report: dict[str, Any], page: str) -> None:
    """Catches a plot that a screen reader cannot tell, and one without the table behind it."""
    figures = re.findall(r"<figure>.*?</figure>", page, re.S)
    captions = [re.findall(r"<figcaption>(.*?)</figcaption>", figure)[0] for figure in figures]
    again = captions.index(captions[0], 1)  # where the other temperature begins
    assert captions[:again] == CAPTIONS
    for figure in figures:
        assert re.search(r'<svg role="img" aria-label="[^"]{5,}"', figure)
        assert "<details><summary>" in figure and "<caption>" in figure
        assert figure.count("<tr>") > 1
    row = report["rows"][1]
    low, high = row["acceptance"]["tau_interval"]
    assert f"{row['acceptance']['tau']:.2f} ({low:.2f}-{high:.2f})" in page
    assert "max_tokens 36" in page and "made up" in page  # settings and prompts


def test_a_side_has_one_color_everywhere(report: dict[str, Any]) -> None:
    """Catches colors that follow the order within a plot: of two sides one alone has trees."""
    rows = [row for row in report["rows"] if row["temperature"] == 0 and row["concurrency"] == 1]
    charts = Charts(Palette(rows))

    def colors(svg: str) -> set[str]:
        return set(re.findall(r"var\(--(side-\d|plain)\)", svg))

    assert colors(charts.accepted_by_rank(rows)) == {"side-1"}
    assert colors(charts.tokens_per_step(rows)) == {"side-0", "side-1"}
    assert colors(charts.tokens_per_step(rows[2:3])) == {"side-1"}
    assert colors(charts.time_by_part(rows)) == set()
    assert "#0a0b" not in charts.serving_curve(report["rows"])


def test_colors_are_read_well_in_light_and_dark() -> None:
    """Catches a color too near to the ground: 3 to 1 for lines and bars, 4.5 for text (WCAG)."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [
            part / 12.92 if part <= 0.04 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for mode in (0, 1):
        for name, pair in COLORS.items():
            least = 4.5 if name in ("ink", "soft", "note") else 3.0
            if name.startswith("side") or name in ("ink", "soft", "note", "plain", "good", "own"):
                for ground in ("page", "card"):
                    two = sorted(luminance(one) for one in (pair[mode], COLORS[ground][mode]))
                    assert (two[1] + 0.05) / (two[0] + 0.05) >= least, (name, ground, mode)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 400])
def test_chromium_shows_all_plots(width: int, page: str, tmp_path: Path) -> None:
    """Catches plots that are empty, cut off or unreadable, a page wider than the window, and errors
    on the console.
    """
    assert CHROMIUM is not None
    file = tmp_path / "page.html"
    file.write_text(
        re.sub(r"<meta http-equiv=[^>]*>", "", page).replace("</body>", MEASURE + "</body>"),
        encoding="utf-8",
    )
    done = _chromium(width, "--dump-dom", file.as_uri())
    found = re.search(r"<pre id=\"?result\"?>(.*?)</pre>", done.stdout)
    assert found, done.stdout[:500] + done.stderr[-500:]
    result = json.loads(found[1])
    assert result["scrollWidth"] <= result["width"], "the page scrolls sideways"
    assert len(result["figures"]) == page.count("<figure>") >= 16
    for figure in result["figures"]:
        assert figure["width"] > 250
        assert figure["height"] > 150
        assert figure["left"] >= 0
        assert figure["right"] <= result["width"]
        assert figure["texts"] > 5
        assert figure["marks"] > 5
        assert figure["outside"] == 0, "text sticks out of its plot"
        assert figure["smallest"] >= 9, "text too small to read"
    # at least an anchor, a draft and the target's token in each of two trees
    assert len(result["nodes"]) > 2 * 2
    assert all(node["fits"] and node["height"] == 22 for node in result["nodes"]), (
        "a token sticks out of its box, or is scaled"
    )


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_chromium_has_nothing_to_complain_about(page: str, tmp_path: Path) -> None:
    """The page itself, its content security policy included."""
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    assert "CONSOLE" not in _chromium(1280, "--dump-dom", file.as_uri()).stderr
    file.write_text(
        page.replace("</body>", "<script>console.error('seen')</script></body>"), encoding="utf-8"
    )
    assert "CONSOLE" in _chromium(1280, "--dump-dom", file.as_uri()).stderr, (
        "the console is not being watched"
    )


def _chromium(width: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    # A window narrower than 500 cannot be had headless, so the device is emulated by its size.
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--enable-logging=stderr", "--log-level=0",
    ]  # fmt: skip
    command = [
        CHROMIUM, *options, f"--window-size={width},1600", "--virtual-time-budget=2000", *arguments,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=True)
