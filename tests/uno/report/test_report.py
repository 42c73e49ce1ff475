"""The page as a whole: inert, complete without scripts, honest about what is
missing.
"""

import json
import shutil
import subprocess

import pytest

from tests.uno.report.reading import Page, requests
from tests.uno.report.runs import HOSTILE, hostile_task, small_config, write_run
from uno.data.files import Storage
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.report import charts
from uno.report.page import percent
from uno.report.report import open_task, write_report
from uno.report.sample import open_model
from uno.results.classes import apply_edits
from uno.results.infer import save_model
from uno.results.metrics import PROTOCOLS
from uno.text import visible

CONFIG, TASK = small_config(), hostile_task(small_config())
GROUPS = [
    f"{split}/{group}"
    for split in ("train", "test")
    for group in ("known", "novel", "all")
]
KEYS = [
    f"{group}/{protocol}/acc/{w}"
    for group in GROUPS
    for protocol in PROTOCOLS
    for w in ("avg", "best")
]
METRICS = {key: 0.1 + 0.8 * i / 48 for i, key in enumerate(KEYS)} | {
    "train/novel/task_aware/chance/acc": 0.2345,
    "baseline/kmeans/novel/acc": 0.9512,
}


def written(storage: Storage, *what, config=CONFIG, **how) -> Page:
    assert write_report(config, storage, *what, **how) == storage.path("report.html")
    return Page(storage.read("report.html").decode())


GLOSSARY = "a href=https://github.com/uno-discovery/uno-on-ray/blob/main/docs/start/concepts.md"
"""The one address, which a reader may follow and the page never does."""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> tuple[Page, str, Storage]:
    storage = write_run(tmp_path_factory.mktemp("run"), CONFIG, TASK, METRICS)
    return written(storage, TASK), storage.read("report.html").decode(), storage


def test_hostile_names_are_inert_and_nothing_is_asked_for(hostile):
    """Kills: a template without autoescape, `|safe`, JSON with a raw `<`, names
    pasted into SVG or titles.
    """
    page, html, _ = hostile
    assert page.unclosed == [] and requests(page) == [GLOSSARY]
    # data and our own; nobody else's
    assert len(page.scripts) == 2 and "alert(1)" not in page.scripts[1]
    assert not [
        name for _, attrs in page.tags for name in attrs if name.startswith("on")
    ]
    assert "{{ 7 * 7 }}" in page.text and all(
        visible(name) in page.text for name in HOSTILE
    )
    assert not any(char in html for char in "\u202e\u2028\u2029\x00\x1b")
    points = page.data()["map"]
    assert "</script>" in points["true_names"][0]
    assert len(points["ids"]) == len(points["truth"]) == len(points["xy"]) // 2
    policy = next(
        a["content"]
        for _, a in page.tags
        if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert (
        policy.startswith("default-src 'none'; img-src data:;")
        and "'unsafe-eval'" not in policy
    )
    assert "@import" not in html and "url(" not in html.split("<script")[0]


def test_numbers_equal_metrics(hostile):
    """Kills: columns in another order than their heads, a best shown as an average."""
    page = hostile[0]
    assert page.exact == {key: f"{value:.4f}" for key, value in METRICS.items()}
    assert all(text == percent(METRICS[key]) for _, key, text in page.shown)
    cells = [key for tag, key, _ in page.shown if tag == "td"]
    assert sorted(cells) == sorted(METRICS)
    assert cells[:12] == [
        f"{group}/task_aware/acc/{which}"
        for group in GROUPS
        for which in ("avg", "best")
    ]
    assert (
        next(key for tag, key, _ in page.shown if tag == "span")
        == "train/novel/task_aware/acc/avg"
    )


def test_page_is_complete_without_scripts(hostile):
    """Everything that answers a question is markup: sections, galleries, heat maps,
    maps, curves, tables.
    """
    page = hostile[0]
    sections = {
        "summary",
        "classes",
        "results",
        "confusion",
        "map",
        "training",
        "known",
        "bad",
        "run",
    }
    anchors = {
        a["href"][1:]
        for tag, a in page.tags
        if tag == "a" and a["href"].startswith("#")
    }
    assert sections | anchors <= page.ids()
    classes = {
        word for _, attrs in page.tags for word in attrs.get("class", "").split()
    }
    assert {"matrix", "map", "tiles-of", "line", "heads", "results"} <= classes
    for word in ("No better than clustering", "config.yaml", "uno discover"):
        assert word in page.text


@pytest.mark.slow
def test_page_without_truth_metrics_or_test_split(tmp_path):
    task = hostile_task(CONFIG, truth=False)
    page = written(write_run(tmp_path / "truth", CONFIG, task), task)
    assert (
        "No ground truth for the new classes" in page.text
        and "There is no metrics.json" in page.text
    )
    known = {key: value for key, value in METRICS.items() if "/known/" in key}
    page = written(write_run(tmp_path / "known", CONFIG, task, known), task)
    assert sorted(key for tag, key, _ in page.shown if tag == "td") == sorted(known)
    assert {
        "results-title",
        "by-predicted",
    } <= page.ids() and "by-true" not in page.ids()
    task = hostile_task(CONFIG, test=False)
    metrics = {
        key: value for key, value in METRICS.items() if not key.startswith("test/")
    }
    page = written(write_run(tmp_path / "split", CONFIG, task, metrics), task)
    assert "confusion" in page.ids() and "Test images" not in page.text


@pytest.mark.parametrize("damage", ["missing", "damaged", "unreadable"])
def test_page_without_the_run_s_files(tmp_path, damage):
    storage = write_run(tmp_path, CONFIG, TASK, METRICS)
    for name in (
        "metrics.json",
        "metrics.jsonl",
        "environment.json",
        "bad_samples.jsonl",
    ):
        storage.delete(name)
        if damage == "damaged":
            storage.write(name, b'[{"phase": 3}, \xff\x00')
        elif damage == "unreadable":
            (tmp_path / name).mkdir()
    storage.delete("checkpoints")
    page = written(storage, TASK)
    assert (
        "No predictions: no discovery checkpoint" in page.text
        and "Heads and training" not in page.text
    )
    assert ("environment.json could not be read" in page.text) == (damage == "damaged")
    assert ("metrics.jsonl, bad_samples.jsonl could not be read" in page.text) == (
        damage == "unreadable"
    )
    assert requests(page) == []


def test_estimate_of_the_number_of_classes(tmp_path):
    storage = write_run(tmp_path, CONFIG, TASK)
    estimate = {
        "ks": [2, 5, 9],
        "curves": {"f1": [0.2, 0.9, 0.5]},
        "num_novel": 5,
        "low": 4,
        "high": 6,
        "suggested": 6,
    }
    storage.write("estimate.json", json.dumps(estimate).encode())
    page = written(storage, None)
    assert "estimate" in page.ids() and "Estimated: 5, between 4 and 6" in page.text
    storage.write("estimate.json", b'{"ks": [1], "curves": {"f1": ["<b>"]}}')
    assert "estimate" not in written(storage, None).ids()


def test_page_without_data_and_on_a_sample(tmp_path, monkeypatch):
    storage = write_run(tmp_path / "other", CONFIG, TASK, METRICS)
    # the digits: other data than the fingerprint's
    found, note = open_task(CONFIG, storage)
    assert found is None and "fingerprint differs" in note
    page = written(storage, None, note=note)
    assert (
        "fingerprint differs" in page.text
        and "map" not in page.ids()
        and "run" in page.ids()
    )
    config = small_config(**{"data.limit": 100})
    task = make_task(read_rows(config.data), config.data)
    monkeypatch.setattr("uno.report.sample.MAX_ROWS_CPU", 60)
    page = written(write_run(tmp_path / "sample", config, task), task, config=config)
    assert "in a random sample of 60" in " ".join(page.text.split())
    assert len(page.data()["map"]["ids"]) == 60


# A document whose objects answer everything; used() is what a field or button does.
PAGE = """
const [script, data, edits] = JSON.parse(require("fs").readFileSync(0)), made = [], said = [];
const any = (own) => new Proxy(own, { get: (it, name) => (name in it ? it[name] : () => any({})) });
const element = () => made[made.push(any({ options: [], classList: any({}),
  addEventListener(_, used) { this.used = used; } })) - 1];
const save = element(), status = element();
save.querySelector = (what) => (what === "button" ? save : status);
Object.assign(globalThis, { addEventListener() {}, location: any({}), URL: any({}), Option: function () {},
  Blob: function (parts) { said.push(parts[0]); }, document: any({ documentElement: save,
    createElement: element, querySelector: (what) => (what === ".save" ? save : null),
    querySelectorAll: () => [], getElementById: (id) => (id === "data" ? { textContent: data } : null) }) });
eval(script);
edits.map(([i, value]) => { made[i + 2].value = value; made[i + 2].used(); said.push(status.textContent); });
save.disabled || save.used();
console.log(JSON.stringify(said));
"""  # noqa: E501


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on this machine")
def test_names_edited_in_the_page_are_applied(tmp_path, monkeypatch):
    """The script's own text, on a document of a few objects. Kills: a name that breaks
    YAML, a target by its old name, actions exchanged, a file that --apply refuses.
    """
    monkeypatch.setattr(charts, "place_points", lambda *_: None)
    storage = write_run(tmp_path, CONFIG, TASK)
    trained = open_model(CONFIG, storage, TASK, "cpu")
    model = save_model(CONFIG, storage, trained.module, trained.best_head, TASK.known)
    page = written(storage, TASK)

    def edited(*edits) -> list[str]:
        """What the page says after each, and the file that can be saved."""
        given = json.dumps([page.scripts[1], page.scripts[0], edits]).encode()
        command = ["node", "-e", PAGE]
        return json.loads(subprocess.check_output(command, input=given, timeout=60))

    # fields are name and action of each discovered class, by turns; indices 5 to 9
    hard = "é 😀: #\"'\\ - x"
    *_, said, text = edited((0, hard), (3, "5"), (5, "drop"), (7, "1"))
    assert said == "4 classes are changed."
    given = "classes.yaml", model.classes, model.model_hash
    found = [(c.name, c.into) for c in apply_edits(text.encode(), *given)[5:]]
    assert found == [
        (hard, 5),
        ("novel-2", 5),
        ("novel-3", None),
        ("novel-4", 1),
        ("novel-5", 9),
    ]
    for edits, says in (
        ([(0, " ")], "needs a name"),
        ([(0, "novel-2")], "Two classes"),
        ([(3, "5"), (1, "drop")], "itself merged or dropped"),
        ([(0, "x"), (0, "novel-1")], "Nothing"),
    ):
        assert says in edited(*edits)[-1]  # and no file


FRAMES = """<!doctype html><body>{frames}<script>onload = () => {{
for (const frame of document.querySelectorAll("iframe")) {{
  const page = frame.contentDocument, table = page.querySelector("#overview").parentElement;
  for (const part of [page.documentElement, table])
    if (part.scrollWidth > part.clientWidth) console.error(`clipped: ${{part.tagName}} at ${{frame.width}}`);
}}}}</script>"""  # noqa: E501


@pytest.mark.release
def test_chromium_opens_it_without_a_word_and_clips_nothing(hostile, tmp_path):
    """At the width of a screen and of a phone. Kills: a column of the classes that
    one must scroll to.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        pytest.skip("no chromium on this machine")
    picture, frames = tmp_path / "page.png", tmp_path / "frames.html"
    both = "".join(
        f'<iframe src="file://{hostile[2].path("report.html")}" width="{side}"'
        ' height="900"></iframe>'
        for side in (1400, 390)
    )
    frames.write_text(FRAMES.format(frames=both))
    flags = (
        "--headless --no-sandbox --disable-gpu --no-first-run"
        " --disable-background-networking --disable-component-update --disable-sync"
        " --enable-logging=stderr --v=0 --allow-file-access-from-files"
        f" --user-data-dir={tmp_path}/profile --screenshot={picture}"
        f" --window-size=1450,2000 file://{frames}"
    )
    command = [chromium, *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert "CONSOLE" not in done.stderr, done.stderr
    assert picture.stat().st_size > 20_000
