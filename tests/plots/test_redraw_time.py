"""How long a reader waits for a figure after moving its slider, as the browser sees it."""

from __future__ import annotations

from typing import Any

from sparse_tl.plots import circuit_diagram, component_diagram

# From the event to the end of the frame that shows its effect, in milliseconds.
REDRAW_TIMES = """async ([name, values]) => {
  const slider = document.querySelector(`input[name=${name}]`);
  const times = [];
  for (const value of values) {
    await new Promise((resolve) => setTimeout(resolve, 50));
    const start = performance.now();
    slider.value = value;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    await new Promise((resolve) => requestAnimationFrame(() => {
      const channel = new MessageChannel();
      channel.port1.onmessage = resolve;
      channel.port2.postMessage(null);
    }));
    times.push(performance.now() - start);
  }
  return times;
}"""


# From a move of the pointer over the figure to the end of what the script does about it.
HOVER_TIMES = """() => {
  const line = document.querySelector("path[data-edge]");
  const box = document.querySelector("svg").getBoundingClientRect();
  return [0.3, 0.4, 0.5, 0.6].map((share) => {
    const start = performance.now();
    const at = { clientX: box.left + share * box.width, clientY: box.top + 0.5 * box.height };
    line.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, ...at }));
    return performance.now() - start;
  });
}"""


def fastest(page: Any, name: str, values: list[float]) -> float:
    """The fastest redraw: what a figure needs where nothing else keeps the machine busy."""
    page.wait_for_selector("[data-ready]")
    return min(page.evaluate(REDRAW_TIMES, [name, values]))


def test_a_circuit_of_two_thousand_edges_stays_fluid(page, tmp_path, make_random_circuit):
    circuit = make_random_circuit(12, 12, n_edges=2000)
    figure = component_diagram({"GPT-2 small": circuit}, max_edges=2000)
    page.goto(figure.save(tmp_path / "figure.html").as_uri())
    values = [1900, 2000, 1800, 2000, 1700, 2000, 1900, 2000]
    assert fastest(page, "edges", values) <= 100
    first, *later = page.evaluate(HOVER_TIMES)
    assert first <= 1000 and min(later) <= 50
    assert not page.locator(".tip").is_hidden()
    assert page.locator("path[data-edge]").count() == 2000
    page.locator("input[name=edges]").fill("1234")
    assert page.locator("path[data-edge]").count() == 1234


def test_a_dense_diagram_stays_fluid(page, tmp_path, two_panels):
    figure = circuit_diagram(two_panels)
    html = str(figure)
    assert len(html.encode()) <= 300_000
    page.goto(figure.save(tmp_path / "figure.html").as_uri())
    assert fastest(page, "threshold", [0.05, 0.0, 0.1, 0.0, 0.2, 0.0]) <= 100
