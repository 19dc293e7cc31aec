"""The page in a real browser: it draws, on a desktop and on a phone, and complains about nothing."""

from __future__ import annotations

import pytest

from tests.browser import NAMES, browser, find_chromium
from tests.trainer.report.folders import write_run
from trainer.report import write_report

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(CHROMIUM is None, reason=f"no browser is installed: none of {', '.join(NAMES)} is on PATH"),
]
DRAWN = "[...document.querySelectorAll('figure, .timeline')].filter((one) => one.querySelector('.series[d^=M]')).length"
COUNT = "document.querySelectorAll('figure, .timeline').length"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
TAPPED = """(() => {
  const span = document.querySelectorAll('.tokens span')[7];
  span.scrollIntoView({block: 'center'});
  span.click();
  const tip = document.getElementById('tip'), box = tip.getBoundingClientRect();
  return [tip.innerText, box.left >= 0 && box.right <= innerWidth && box.bottom <= innerHeight];
})()"""

TOLD = """((start) => {
  const strip = document.querySelector('.timeline .scroll');
  strip.scrollIntoView({block: 'center'});
  const label = [...document.querySelectorAll('.timeline .lane')].find((one) => one.textContent.startsWith(start));
  const box = strip.firstChild.getBoundingClientRect(), y = label.getBoundingClientRect().bottom + 8;
  const at = {clientX: box.left + 0.03 * box.width, clientY: y, pointerType: 'mouse', bubbles: true};
  strip.dispatchEvent(new PointerEvent('pointermove', at));
  return document.getElementById('tip').innerText.split('\\n').slice(1);
})"""
"""What the timeline tells of the lane whose label begins so, near the beginning of the run."""

GROUNDS = "new Set([...document.querySelector('.tokens').children].map((span) => span.style.background)).size"


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module", params=[1, 2], ids=["one run", "two runs"])
def page(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return write_report([write_run(folder / f"run-{number}", seed=number) for number in range(request.param)])


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_chart_draws_and_nothing_overflows_or_complains(tab, page, width, dark):
    tab.problems.clear()
    tab.requests.clear()
    tab.open(page, width=width, dark=dark, mobile=width == 390)
    assert tab.evaluate(DRAWN) == tab.evaluate(COUNT) > 15
    assert tab.evaluate(OVERFLOW) == 0
    assert tab.problems == []
    assert set(tab.requests) == {page.absolute().as_uri()}


@pytest.mark.parametrize("width", [1280, 390])
def test_a_token_tells_its_text_version_log_probability_and_advantage(tab, page, width):
    tab.open(page, width=width, mobile=width == 390)
    told, inside = tab.evaluate(TAPPED)
    assert told.splitlines() == [
        'token 8 of 40: "h"', "log-probability -0.5 (60.7%)", "version 10, 1 behind the learner", "advantage 0.5"
    ]  # fmt: skip
    assert inside
    assert tab.evaluate(GROUNDS) == 3, "two versions, and the marks between them"


@pytest.mark.parametrize("width", [1280, 390])
def test_the_timeline_tells_what_each_engine_had_and_which_version_was_evaluated(tab, page, width):
    tab.open(page, width=width, mobile=width == 390)
    assert tab.evaluate(f"{TOLD}('Rollouts of each engine, 8 at most')") == ["engine 0: 8 rollouts"]
    assert tab.evaluate(f"{TOLD}('Evaluations')") == ["evaluation of version 0: 4 s"]
    assert tab.evaluate(f"{TOLD}('Groups being sampled')") == ["2 groups being sampled"]


@pytest.mark.parametrize("width", [1280, 390])
def test_a_run_of_many_steps_shows_what_its_means_hide(tab, tmp_path, width):
    tab.problems.clear()
    tab.open(write_report([write_run(tmp_path / "run", steps=1000, tokens=8, every=500)]), width=width)
    assert tab.evaluate(DRAWN) == tab.evaluate(COUNT) > 15
    assert tab.evaluate(OVERFLOW) == 0
    assert tab.problems == []
    said = "document.querySelector('figure:has(.series) .help').textContent"
    assert "A point is the mean of 3 steps" in tab.evaluate(said)


def test_the_timeline_zooms(tab, page):
    tab.open(page, width=390, mobile=True)
    widths = tab.evaluate("""(() => {
      const strip = document.querySelector('.timeline .scroll'), plus = document.querySelector('.timeline button');
      const before = strip.scrollWidth;
      plus.click();
      return [before, strip.scrollWidth];
    })()""")
    assert widths[1] == 2 * widths[0]
    assert tab.evaluate(OVERFLOW) == 0
