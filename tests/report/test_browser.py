"""report.html in a real browser: by clicks and keys, at both widths, without errors, requests or scripts of others.

Needs Chromium and its driver (apt-get install chromium chromium-driver); `-s` shows what the large page measures.
"""

from __future__ import annotations

import json
import shutil
import time

import numpy as np
import pytest

from rpg_jax.report import page
from rpg_jax.report.run_files import Run
from rpg_jax.types import Turns

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no Chromium with its driver is installed"),
]

EVIL = "</script><script>window.stolen = 1</script><img src=http://example.com/x onerror='window.stolen = 1'>"


@pytest.fixture(scope="module")
def driver():
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


class Page:
    """What a person does on the page and sees of it."""

    def __init__(self, driver, file):
        self.driver = driver
        for log in ("browser", "performance"):
            driver.get_log(log)
        driver.get(file.as_uri())
        self.until("return 'ready' in document.documentElement.dataset")

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def until(self, script, *arguments):
        end = time.monotonic() + 20
        while not (value := self.run(script, *arguments)):
            assert time.monotonic() < end, script
            time.sleep(0.02)
        return value

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def click(self, selector):
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", self.find(selector))
        self.find(selector).click()

    def choose(self, select, text):
        from selenium.webdriver.support.ui import Select

        Select(self.find(f"#{select}")).select_by_visible_text(text)

    def press(self, *keys):
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        for key in keys:
            ActionChains(self.driver).send_keys(getattr(Keys, key, key)).perform()

    def text(self, selector):
        return self.find(selector).text

    def chosen(self):
        """(place in the list, facts) of the chosen completion."""
        return int(self.find("[aria-selected=true]").get_attribute("aria-posinset")), self.text(".chosen .facts")

    def focused(self):
        return self.run("const e = document.activeElement; return e.dataset.token ?? e.id")

    def number(self, name):
        """A number of the strip that describes the token."""
        cells = self.run(
            "return [...document.querySelectorAll('.strip > div')].map(c => [c.children[0].innerText, "
            "c.children[1].innerText])"
        )
        return float(dict(cells)[name].replace("−", "-"))

    def trouble(self):
        """Console messages, and requests to anywhere but the page itself."""
        messages = [entry["message"] for entry in self.driver.get_log("browser")]
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return messages, [url for url in urls if not url.startswith(("file:", "data:", "blob:"))]


@pytest.fixture
def opened(driver, leave_run, tmp_path):
    """Two configs with two seeds each."""
    runs = [
        leave_run(tmp_path / f"{method}-{seed}", seed=seed, accuracy=0.4 + 0.1 * seed, config={"method": method})
        for method in ("GRPO", "DAPO")
        for seed in (0, 1)
    ]
    found = Page(driver, page.write_page([Run.read(run) for run in runs], tmp_path / "report.html"))
    yield found
    assert found.trouble() == ([], [])


def test_a_figure_is_as_wide_as_its_place_whenever_that_changes(opened):
    for width in ("900px", "520px", ""):  # the window stays as it is
        opened.run("document.body.style.width = arguments[0]", width)
        opened.until(
            "return [...document.querySelectorAll('.canvas')]"
            ".every(canvas => canvas.querySelector('svg').clientWidth === canvas.clientWidth)"
        )


def test_tables_figures_and_the_crosshair(opened):
    assert [cell.text for cell in opened.all("#results tbody th") if cell.is_displayed()] == ["GRPO", "DAPO"]
    assert len(opened.all("#figures figure")) == 5 and len(opened.all("#figures .band")) == 10
    opened.click("#legend button")
    assert opened.find("#legend button").get_attribute("aria-pressed") == "false"
    assert len(opened.all("#figures .band")) == 5
    opened.run("document.querySelector('#figures svg').focus()")
    opened.press("ARROW_LEFT", "ARROW_LEFT")
    assert "step 9" in opened.text("#figures .readout:not([hidden])")
    assert {line.get_attribute("visibility") for line in opened.all(".hair")} == {"visible"}


def test_the_switch_moves_tables_and_curves_to_another_cost(opened):
    shown = "return [...document.querySelectorAll('.at-equal')].filter(e => e.offsetHeight).map(e => e.dataset.axis)"
    assert opened.run(shown) == ["steps"] and opened.text("#axis-note").startswith("The horizontal axis has steps")
    opened.click(".switch [value=seconds]")
    assert opened.run(shown) == ["seconds"] and opened.text("#axis-note").startswith("The horizontal axis has seconds")
    opened.run("document.querySelector('#figures svg').focus()")
    opened.press("ARROW_LEFT", "ARROW_LEFT")
    assert "9.00 seconds" in opened.text("#figures .readout:not([hidden])"), "a second a step, without compilation"


def test_tables_and_the_switch_need_no_script(driver, leave_run, tmp_path):
    file = page.write_page([Run.read(leave_run(tmp_path / "a"))], tmp_path / "report.html")
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    driver.get(file.as_uri())
    driver.find_element("css selector", ".switch [value=seconds]").click()
    shown = [
        e.get_attribute("data-axis") for e in driver.find_elements("css selector", ".at-equal") if e.is_displayed()
    ]
    assert shown == ["seconds"] and driver.find_element("css selector", "#timing-table").is_displayed()
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_filters_and_search_narrow_the_list_and_say_by_how_much(opened):
    assert opened.text("#count") == "16 of 16 completions, 50.0 % right"
    opened.click("[data-filter=truncated]")
    assert opened.text("#count") == "4 of 16 completions, 100.0 % right"
    opened.click("[data-filter=wrong]")
    assert opened.text("#count") == "0 of 16 completions"
    assert opened.text("#detail") == "No completion passes the filters."
    opened.click("[data-filter=truncated]")
    assert opened.text("#count") == "8 of 16 completions, 0.0 % right"
    opened.find("#contains").send_keys("3+1")
    assert opened.text("#count") == "2 of 16 completions, 0.0 % right"


def test_steps_groups_and_orders_can_be_chosen(opened):
    assert "step 10" in opened.text("#detail h3")
    opened.choose("step", "1")
    opened.until("return document.querySelector('#detail h3').innerText.includes('step 1 ')")
    opened.choose("group", "2: 2+1=")
    assert opened.text("#count").startswith("4 of 16") and opened.text(".prompt") == "2+1="
    opened.choose("step", "every step kept")
    opened.until("return document.querySelector('#count').innerText.startsWith('32 of 32')")
    opened.choose("sort", "reward, lowest")
    assert [row.text for row in opened.all("#list .row > :nth-child(2)")][:2] == ["0.00", "0.00"]
    opened.choose("run", "DAPO-1")
    opened.until("return document.querySelector('#count').innerText.startsWith('32 of 32')")


def test_a_run_that_writes_answers_backwards_says_so(driver, leave_run, tmp_path):
    tasks = {"backwards": {"name": "arithmetic", "reverse": True}, "files": {"name": "files", "reverse": True}}
    runs = [leave_run(tmp_path / name, config={"task": task}) for name, task in tasks.items()]
    found = Page(driver, page.write_page([Run.read(run) for run in runs], tmp_path / "report.html"))
    assert "24 is 42" in found.text("#backwards")
    found.choose("run", "files")
    found.until("return document.querySelector('#backwards').hidden")
    assert found.trouble() == ([], [])


def test_colours_follow_the_quantity_and_its_scale(opened):
    assert set(opened.run("return [...document.querySelectorAll('.member .token')].map(t => t.className)")) & {
        "token above",
        "token below",
    }
    opened.choose("colour", "entropy")
    assert "nats" in opened.text("#scale") and opened.all(".member .token.amount") and not opened.all(".token.below")
    opened.choose("colour", "clip state")
    assert (
        "its upper bound" in opened.text("#scale")
        and opened.all(".member .clip-high")
        and opened.all(".member .clip-low")
    )
    assert [state.text for state in opened.all("#scale i")] == ["high", "low"], "no state that no token has"


def test_everything_can_be_done_by_keys(opened):
    opened.press("j", "j")
    assert opened.chosen()[0] == 3, "wherever the focus is"
    opened.run("document.querySelector('#list').focus()")
    opened.press("ARROW_DOWN", "k", "END")
    assert opened.chosen()[0] == 16
    opened.press("HOME", "ENTER", "ARROW_RIGHT", "ARROW_RIGHT")
    assert opened.focused() == "2" and "TOKEN 3 OF 6" in opened.text(".strip").upper()
    assert opened.number("log π behaviour") == -1
    opened.press("ESCAPE")
    assert opened.focused() == "list" and opened.chosen()[0] == 1
    outline = opened.run("return getComputedStyle(document.querySelector('#list')).outlineStyle")
    assert outline == "solid", "focus is visible"
    unnamed = opened.run(
        "return [...document.querySelectorAll('button, select, input, [tabindex]')].filter(e => !e.closest('label') && "
        "!e.getAttribute('aria-label') && !e.innerText.trim()).map(e => e.outerHTML)"
    )
    assert unnamed == []


def test_it_fits_both_widths_and_follows_the_colour_scheme(opened):
    colours = []
    for width, scheme in ((390, "light"), (1400, "dark")):
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        opened.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        opened.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        opened.until("return innerWidth === arguments[0]", width)
        opened.until("return document.documentElement.scrollWidth <= arguments[0]", width)  # figures follow in a frame
        assert 0 < opened.run("return document.querySelector('#figures svg').clientWidth") < width
        colours.append(opened.run("return getComputedStyle(document.body).backgroundColor"))
    opened.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    opened.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert len(set(colours)) == 2


def test_a_conversation_shows_its_turns_and_what_the_environment_wrote_in_grey(driver, leave_run, tmp_path):
    turns = Turns(np.array([0, 0, 1, 1, 0, 0]) == 1, np.float32([0.25, -1]), "timeout")
    texts = ["<tool_call>x</tool_call>", "b"]
    run = Run.read(leave_run(tmp_path / "a", turns=turns, texts=texts))
    found = Page(driver, page.write_page([run], tmp_path / "r.html"))
    assert [mark.text for mark in found.all(".chosen .turn")] == ["turn 1 · reward 0.25", "environment",
                                                                  "turn 2 · reward −1.00"]  # fmt: skip
    assert [t.get_attribute("data-token") for t in found.all(".chosen .token.observed")] == ["2", "3"]
    facts = found.text(".chosen .facts")
    assert found.text("#list .row > :nth-child(4)") == "4", "tokens of the policy"
    assert "4 tokens" in facts and "2 turns" in facts and "environment failed: timeout" in facts and "NaN" not in facts
    calls = found.run("return [...document.querySelectorAll('.token.call')].map(t => t.innerText)")
    assert set(calls) == {"<tool_call>x</tool_call>"}
    found.run("document.querySelector('#list').focus()")
    found.press("ENTER", "ARROW_RIGHT", "ARROW_RIGHT")
    assert found.focused() == "2", "over the mark between them"
    assert "OBSERVED" in found.text(".strip").upper() and "NaN" not in found.text("main")
    found.choose("colour", "clip state")
    assert "written by the environment" in found.text("#scale") and len(found.all(".chosen .token.observed")) == 2
    found.choose("sort", "largest gap")
    assert found.trouble() == ([], [])


def test_a_long_completion_shows_its_end_its_special_tokens_the_answer_and_what_is_sought(driver, leave_run, tmp_path):
    run = leave_run(tmp_path / "a", tokens=300, texts=["up ", "down\n", "no answer "], prompt="Where to, for {}?")
    found = Page(driver, page.write_page([Run.read(run)], tmp_path / "report.html"))
    whole = found.run("return textOf(state.list[0])")
    shown = found.find("#list .row .ending").get_attribute("innerText")
    assert len(whole) > 1000 and shown.startswith("…") and " ".join(whole.split()).endswith(shown[1:])
    assert found.text("#list .row .answer") == "7"
    assert [end.text for end in found.all(".chosen .silent")] == ["<end>"] and "<end>" not in whole
    assert "240 more" in found.text(".member:not(.chosen) .tokens") and "<end>" in found.text(".member:not(.chosen)")
    found.find("#contains").send_keys("UP NO ans")
    marked = found.run("return [...document.querySelectorAll('.chosen .found')].map(t => t.textContent)")
    assert marked and marked == ["up ", "no answer "] * (len(marked) // 2)
    assert "up no answer" in found.text("#list .row .place")
    assert found.run(
        "const f = document.querySelector('.chosen .found').getBoundingClientRect(), "
        "p = document.querySelector('#detail').getBoundingClientRect(); return f.top >= p.top && f.bottom <= p.bottom"
    )
    found.find("#contains").clear()
    found.find("#contains").send_keys("7")
    assert found.text("#count").startswith("16 of 16"), "the reference answer is searched too"
    assert found.trouble() == ([], [])


def test_scripts_in_prompts_completions_and_names_are_text(driver, leave_run, tmp_path):
    run = leave_run(
        tmp_path / "<script>window.stolen = 1<script>", texts=[EVIL, "b"], prompt=EVIL, config={"method": EVIL}
    )
    found = Page(driver, page.write_page([Run.read(run)], tmp_path / "report.html"))
    assert "<script>window.stolen = 1<script>" in found.text("#runs") and EVIL in found.text(".prompt")
    assert EVIL in found.text(".chosen .tokens") and EVIL in found.text("#results tbody th")
    found.choose("step", "every step kept")
    assert found.run("return window.stolen === undefined && document.images.length === 0")
    found.run(
        "const s = document.createElement('script'); s.textContent = 'window.stolen = 1'; document.body.append(s)"
    )
    assert found.run("return window.stolen === undefined"), "not even a script that the page itself would insert"
    messages, urls = found.trouble()
    assert urls == [] and len(messages) == 1 and "Content Security Policy" in messages[0]


TIMED = """
const [act, done] = arguments, start = performance.now();
document.querySelector(act).click();
requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
"""


def test_ten_thousand_completions_keep_few_rows_and_find_every_one(driver, leave_run, tmp_path):
    run = leave_run(tmp_path / "large", groups=1250, size=8, tokens=40, texts=list("abcdefghijklmnopqrstuvwxyz +="))
    file = page.write_page([Run.read(run)], tmp_path / "report.html", rollout_steps=1)
    found = Page(driver, file)
    assert found.text("#count").startswith("10,000 of 10,000")
    paint = found.until("return performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    ready = found.run("return performance.getEntriesByName('ready')[0].startTime")
    filters = {
        name: driver.execute_async_script(TIMED, f"[data-filter={name}]")
        for name in ("wrong", "truncated", "clipped", "kl", "wrong", "truncated", "clipped", "kl")
    }
    found.run("document.querySelector('#list').scrollTop = 1e9")
    found.until(
        "return [...document.querySelectorAll('#list .row')].some(r => r.getAttribute('aria-posinset') === '10000')"
    )
    assert len(found.all("#list .row")) < 80
    found.click("#list .row[aria-posinset='9999']")
    found.press("END")
    assert found.chosen()[0] == 10_000
    print(f"\n{file.stat().st_size / 1e6:.1f} MB; first paint {paint:.0f} ms, ready {ready:.0f} ms; a filter "
          f"{max(filters.values()):.0f} ms at most")  # fmt: skip
    assert found.trouble() == ([], [])
