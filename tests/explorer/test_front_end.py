"""The explorer's script in a page of its own, with a stub in the place of the kernel."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparse_tl.explorer import CircuitExplorer, explore, widget
from sparse_tl.plots.page.rendering import script_json

PROMPT = "36+28=?????"
QUIET = ("update_saved", "hello", "compute_effects", "choose")

# What anywidget gives a widget: traits, events, and messages, which are only written down here.
STUB = """
const traits = window.traits = TRAITS_HERE, listeners = {};
window.sent = [];
const model = {
  get: (name) => traits[name],
  set: (name, value) => { traits[name] = value; },
  save_changes: () => {},
  send: (content) => window.sent.push(content),
  on: (name, listener) => { listeners[name] = listener; },
  off: (name) => { delete listeners[name]; },
};
window.fire = (name, ...content) => listeners[name]?.(...content);
window.change = (name, value) => { traits[name] = value; window.fire(`change:${name}`); };
window.clean = render({ model, el: document.querySelector("#view") });
"""


@pytest.fixture
def stopped(browser: Any) -> Iterator[Any]:
    """A page on which time passes where a test says so. Its clock is that of a whole context."""
    context = browser.new_context(viewport={"width": 1032, "height": 900}, offline=True)
    page = context.new_page()
    page.clock.install(time=0)
    page.clock.pause_at(1)
    yield page
    context.close()


def show(page: Any, folder: Path, explorer: CircuitExplorer) -> None:
    names = (*explorer.trait_names(late=True), "_theme", "_saved_id")
    traits = {name: getattr(explorer, name) for name in names}
    script = explorer._esm.replace("export default { render };", "")
    stub = STUB.replace("TRAITS_HERE", script_json(traits))
    saved = f'<div data-saved-explorer="{explorer._saved_id}">the saved figure</div>'
    path = folder / "page.html"
    path.write_text(
        f"<!DOCTYPE html><meta charset='utf-8'><style>{explorer._css}</style>"
        f"<body>{saved}<div id='view'></div><script type='module'>{script}{stub}</script></body>",
        encoding="utf-8",
    )
    page.goto(path.as_uri())
    page.wait_for_selector("[data-live]")


def sent(page: Any) -> list[dict[str, Any]]:
    return [m for m in page.evaluate("window.sent") if m["action"] not in QUIET]


def answer(page: Any) -> None:
    told = "{done: m.id, revision: traits._revision, more: false}"
    page.evaluate(f"for (const m of window.sent) window.fire('msg:custom', {told})")


def trait(explorer: CircuitExplorer, name: str) -> Any:
    return json.loads(json.dumps(getattr(explorer, name)))


@pytest.mark.long
def test_clicks_become_requests(page, tmp_path, explorer):
    explorer.select("Dense", 2, 10)
    show(page, tmp_path, explorer)
    page.locator(".card[data-panel='1'] [data-head='1,0']").click()
    page.locator(".heat [data-edge='1,1,10,4']").click()
    page.locator("input[name=prompt]").fill("1+1=")
    page.locator("input[name=prompt]").press("Enter")
    page.locator("g[data-panel='1'] circle[data-level='1'][data-column='3']").click()
    page.keyboard.press("Escape")
    assert [{k: v for k, v in m.items() if k != "id"} for m in sent(page)] == [
        {"action": "toggle_head", "panel": 1, "layer": 1, "head": 0},
        {"action": "toggle_attention_edges", "panel": 0, "edges": [[1, 1, 10, 4]]},
        {"action": "show_prompt", "prompt": "1+1="},
        {"action": "select", "panel": 1, "level": 1, "column": 3},
        {"action": "unselect"},
    ]


def test_a_line_stands_for_the_edge_in_every_head_above_the_threshold(page, tmp_path, explorer):
    show(page, tmp_path, explorer)
    page.locator("input[name=threshold]").fill("0")
    nodes = [
        page.locator(f"g[data-panel='0'] circle[data-level='{level}'][data-column='{column}']")
        for level, column in ((0, 2), (1, 8))
    ]
    start, end = (node.bounding_box() for node in nodes)
    x, y = (start[k] + 0.25 * (end[k] - start[k]) + 4 for k in ("x", "y"))
    page.mouse.click(x, y)
    (request,) = sent(page)
    assert request["action"] == "toggle_attention_edges"
    layer, _, query, key = request["edges"][0]
    heads = [edge[1] for edge in request["edges"]]
    weights = explorer.exploration.models["Dense"].now.graph.attention[layer, :, query, key]
    assert sorted(heads) == [head for head in range(2) if weights[head] >= 0.0005]


def test_choices_outlive_a_new_figure(page, tmp_path, explorer):
    show(page, tmp_path, explorer)
    page.locator("input[name=threshold]").fill("0.3")
    page.locator("select[name=target]").select_option("1")
    page.locator("select[name=head]").select_option("1")
    explorer.toggle_head("Dense", 0, 0)
    page.evaluate("v => window.change('_panels', v)", trait(explorer, "_panels"))
    page.evaluate("v => window.change('_figure', v)", trait(explorer, "_figure"))
    figure = page.locator(".diagram .sparse-tl-circuit")
    names = ("data-threshold", "data-target", "data-head")
    assert [figure.get_attribute(name) for name in names] == ["0.30", "1", "1"]
    assert page.locator("select[name=target]").input_value() == "1"
    assert "position 7" in page.locator(".card[data-panel='0'] h4").inner_text()


def test_deep_models_are_shown_one_at_a_time(page, tmp_path, build_small):
    models = {name: build_small(n_layers=13, seed=seed) for seed, name in enumerate("ab")}
    show(page, tmp_path, explore(models, PROMPT, positions=[9]))
    assert page.locator("g[data-panel]").evaluate_all("gs => gs.map(g => g.dataset.panel)") == ["0"]
    page.locator("select[name=panel]").select_option("1")
    node = page.locator("g[data-panel='1'] circle").last
    node.click()
    assert sent(page)[-1]["panel"] == 1
    page.locator("select[name=panel]").select_option("-1")
    assert page.locator("g[data-panel]").count() == 2


def test_a_restarted_kernel_is_told_and_switches_off_what_needs_it(page, tmp_path, explorer):
    show(page, tmp_path, explorer)
    page.evaluate("window.fire('comm_live_update')")
    text = page.locator(".message").inner_text()
    assert text.startswith("The kernel was restarted: run the cell again.")
    for control in (".heads .cell", ".top button", "input[name=prompt]"):
        assert page.locator(control).first.is_disabled()
    before = page.locator("g[data-panel='0']").get_attribute("data-edges-shown")
    page.locator("input[name=threshold]").fill("0.9")
    assert page.locator("g[data-panel='0']").get_attribute("data-edges-shown") != before
    page.locator("g[data-panel='0'] circle").first.click()
    assert sent(page) == []


def actions(page: Any) -> list[str]:
    return page.evaluate("window.sent.map((m) => m.action)")


def test_a_front_end_that_lacks_something_asks_until_it_has_it(stopped, tmp_path, explorer):
    show(stopped, tmp_path, explorer)
    assert actions(stopped) == ["hello"]
    # The kernel answers, and says that more was sent than has arrived.
    told = "{done: window.sent.length, revision: 2 + traits._revision, more: false}"
    stopped.evaluate(f"window.told = {told}; fire('msg:custom', window.told)")
    stopped.clock.run_for(2100)
    assert actions(stopped)[1:] == ["send_again"]
    stopped.evaluate("fire('msg:custom', { ...window.told, done: 2 })")  # nor that
    stopped.clock.run_for(2100)
    assert actions(stopped)[2:] == ["send_again"]
    stopped.evaluate("change('_revision', window.told.revision)")
    answer(stopped)
    stopped.clock.run_for(60_000)
    assert len(actions(stopped)) == 3


def test_effects_are_asked_for_until_all_are_known(stopped, tmp_path, explorer):
    show(stopped, tmp_path, explorer)
    for done, more in ((1, "true"), (2, "true"), (3, "false")):
        told = f"{{done: {done}, revision: traits._revision, more: {more}}}"
        stopped.evaluate(f"fire('msg:custom', {told})")
    assert actions(stopped) == ["hello", "compute_effects", "compute_effects"]


def test_lines_of_effects_are_offered_and_asked_for(stopped, tmp_path, models, monkeypatch):
    monkeypatch.setattr(widget, "MAX_EFFECTS", 10)
    explorer = explore(models, PROMPT, positions=[9])
    show(stopped, tmp_path, explorer)
    answer(stopped)
    stopped.locator("select[name=weight]").select_option("effect")
    stopped.clock.run_for(300)
    assert actions(stopped)[-2:] == ["choose", "compute_effects"]
    assert stopped.locator("[data-estimate]").count() > 0
    explorer.choose(target=0, weight="effect", threshold=0.1)
    explorer.compute_effects()
    stopped.evaluate("v => window.change('_figure', v)", trait(explorer, "_figure"))
    assert stopped.locator("[data-estimate]").count() == 0
    assert stopped.locator("select[name=weight]").input_value() == "effect"


def test_cards_say_what_happens_without_a_part(page, tmp_path, explorer):
    explorer.select("Dense", 2, 10)
    explorer.compute_effects()
    show(page, tmp_path, explorer)
    told = explorer._effects["heads"][0]["0,1"][4]
    before = explorer._panels[0]["outputs"][4][0]["token"]
    page.locator(".card[data-panel='0'] [data-head='0,1']").hover()
    text = page.locator(".sparse-tl-explorer > .tip").inner_text().splitlines()[1]
    said = re.fullmatch(r"without it: (.*) nats, (.*) percentage points, .*", text)
    for number, value in zip(said.groups(), (told[0], 100 * told[1]), strict=True):
        assert float(number.replace("\u2212", "-")) == pytest.approx(value, rel=0.005)
    then = "still predicts" if told[2] == before else "predicts"
    assert text.endswith(f"{then} \u201c{told[2]}\u201d")
    heads = page.locator(".card[data-panel='0'] .effects li").all_inner_texts()
    strongest = max(explorer._effects["heads"][0].items(), key=lambda item: abs(item[1][4][0]))
    layer, head = strongest[0].split(",")
    assert heads[0].startswith(f"without a{layer}.h{head}: ") and "nats" in heads[0]
    kind = "helps" if strongest[1][4][0] < 0 else "hurts"  # the colours of the grid above
    shown = page.locator(".card[data-panel='0'] .effects li").first.locator("span").first
    assert shown.get_attribute("class") == kind
    assert page.locator(".card.node .effects.whole li").inner_text().startswith("without its atten")
    assert page.locator(".card.node .rows .effects li").count() == 3


def models_best(explorer: CircuitExplorer) -> list[str]:
    """The two likeliest tokens of the whole dense model at the last position."""
    table = explorer.exploration.models["Dense"].outputs(top=13)
    return table.sort_values("logit_before", ascending=False)["token"].tolist()[:2]


@pytest.mark.long
def test_the_metric_is_chosen_and_the_second_token_typed(page, tmp_path, explorer):
    show(page, tmp_path, explorer)
    select = page.locator("select[name=metric]")
    assert select.input_value() == "log_probability"
    assert page.locator("input[name=wrong]").count() == 0
    select.select_option(label="token A \u2212 token B")
    explorer.choose_metric("logit_difference")
    for name in ("_metric", "_panels", "_figure"):
        page.evaluate("args => window.change(...args)", [name, trait(explorer, name)])
    field = page.locator("input[name=wrong]")
    assert field.get_attribute("placeholder") == models_best(explorer)[1]
    field.fill("7")
    page.evaluate("v => window.change('_effects', v)", trait(explorer, "_effects"))
    assert field.input_value() == "7"  # somebody is typing
    field.press("Enter")
    page.locator("select[name=target]").select_option("1")
    second = explorer._panels[0]["quantity"]["wrong"][1]
    assert page.locator("input[name=wrong]").get_attribute("placeholder") == second
    asked = [{k: v for k, v in m.items() if k != "id"} for m in sent(page)]
    assert asked == [
        {"action": "choose_metric", "metric": "logit_difference", "wrong": ""},
        {"action": "choose_metric", "metric": "logit_difference", "wrong": "7"},
    ]
    # What is asked for is what Python understands.
    explorer._handle_custom_msg(asked[1], [])
    assert explorer._metric["wrong"] == "7" and explorer._message is None


def test_a_column_that_is_not_predicted_yet_can_be_chosen(page, tmp_path, models):
    explorer = explore(models, "36+28=")
    show(page, tmp_path, explorer)
    select = page.locator("select[name=target]")
    assert select.locator("option").count() == 6  # five columns besides the last
    select.select_option("+3")
    assert [(m["action"], m["column"]) for m in sent(page)] == [("show_position", 3)]
    explorer._handle_custom_msg({"action": "show_position", "column": 3}, [])
    assert explorer.exploration.targets == ((3, 2), (6, 5)) and explorer._state["target"] == 0
