// Makes the static circuit diagram interactive: attention_draw.js draws every state.
//
// A live figure, whose edges a running kernel can remove and restore, has further options:
//   state            the initial state, instead of data.state
//   onState(state)   called after every change of the state
//   removed          for each panel, the removed edges as {layer, query, key, heads}
//   onEdges(panel, edges)  called with [layer, head, query, key] of each edge of a clicked line
//   positions        further columns that can be predicted
//   onPosition(column)     called when the reader chooses one of them

function start(root, data, live) {
  "use strict";
  live ??= {};
  const svg = root.querySelector("svg");
  // Two panels of deep models do not fit on a screen.
  const alone = live.onEdges && data.panels.length > 1 && data.panels.some(({ shape }) => shape[0] > data.mostUnfolded);
  const state = { ...data.state, focus: null, panel: alone ? 0 : -1, ...live.state };
  const removed = (index) => live.removed?.[index] ?? [];
  // The figure may be on the page more than once.
  data = { ...data, rows: {}, panels: data.panels.map((panel, index) =>
    ({ ...panel, removed: removed(index), unfolded: [] })) };
  let drawn = null, panels = [];
  const names = () => panels.flatMap(({ group }) =>
    [...group.querySelectorAll("[data-role=layers], [data-role=name], [data-role=caption]")]);
  const follow = followScrolling(svg, names, () => {
    const ends = data.targets[state.target].map((column) => drawn.layout.x[column]);
    return [Math.min(...ends) - 40, Math.max(...ends) + 60];
  });

  // ---- drawing -------------------------------------------------------------------------------

  function drawAll() {
    const { target } = root.dataset, focused = focusedIn(svg); // no target before the first layout
    drawn = drawFigure(data, state);
    const { layout: { width }, height } = drawn;
    svg.innerHTML = drawn.markup;
    panels = findPanels(svg, drawn, "#c2410c");
    root.querySelector(".tip").hidden = true;
    setAttributes(svg, { width, height, viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "xMidYMin" });
    // Drawn for the width of a printed page, but larger on screens; a figure of many columns scrolls
    // rather than becoming illegible.
    root.style.maxWidth = `${Math.max(900, width)}px`;
    svg.style.minWidth = `${Math.ceil(0.92 * width)}px`;
    setAttributes(root, {
      "data-target": state.target, "data-weight": state.weight, "data-head": state.head,
      "data-threshold": thresholdText(data, state), "data-alone": panels.length === 1 ? "" : null,
    });
    panels.forEach(addButtons);
    if (focused) svg.querySelector(focused)?.focus({ preventScroll: true });
    if (target) follow(target !== String(state.target));
    live.onState?.(state);
  }

  // ---- controls ------------------------------------------------------------------------------

  function choose(name, value) {
    state[name] = value;
    drawAll();
  }

  function addControls() {
    const output = make("output");
    const slider = make("input", {
      type: "range", name: "threshold", max: 0.99, step: 0.01, min: 0,
      oninput: () => {
        state.limit = Math.round(slider.value * data.steps);
        limit();
        drawAll();
      },
    });
    addControl(root, "Threshold", slider, output);
    // The threshold is at least the lowest for which all edges were sent.
    function limit() {
      const floor = data.floors[state.weight];
      state.limit = Math.max(floor, state.limit);
      slider.min = floor > 1 ? Math.ceil(floor / 10) / 100 : 0;
      slider.value = state.limit / data.steps;
      output.textContent = thresholdText(data, state);
    }
    limit();

    const tokens = data.targets.map(([column], target) => {
      const outputs = [...new Set(data.panels.map((panel) => quoted(panel.output[column])))];
      return [target, `${outputs.join(" / ")}  position ${column}`];
    });
    const others = (live.positions ?? []).map((column) =>
      [`+${column}`, `position ${column} (${quoted(data.panels[0].input[column])} in the prompt)`]);
    const targetSelect = addSelect(root, "Predicted token", "target", [...tokens, ...others],
      state.target, (value) => {
        if (value.startsWith("+")) live.onPosition(Number(value));
        else choose("target", Number(value));
      });
    if (live.onEdges && data.panels.length > 1) {
      addSelect(root, "Model", "panel", [[-1, "all"], ...data.panels.map(({ name }, index) => [index, name])],
        state.panel, (value) => choose("panel", Number(value)));
    }
    const nHeads = Math.max(...data.panels.map((panel) => panel.shape[1]));
    const heads = Array.from({ length: nHeads }, (_, head) => [head, `head ${head}`]);
    addSelect(root, "Heads", "head", [[-1, "all (largest)"], ...heads], state.head,
      (value) => choose("head", Number(value)));
    const some = (kind) => data.panels.some((panel) => panel.weights[kind]);
    const all = data.panels.every((panel) => panel.weights["first-order"]);
    const weights = [
      ["attention", "attention"],
      ...(data.panels.every((panel) => panel.weights.carried) ? [["carried", "what it carries"]] : []),
      // A running kernel computes effects on request.
      ...((some("effect") || live.onEdges) && (all || data.panels.every((panel) => panel.weights.effect))
        ? [["effect", "effect of removal"]] : []),
      ...(all ? [["first-order", "first-order attribution"]] : []),
    ];
    addSelect(root, "Weight", "weight", weights, state.weight, (value) => {
      state.weight = value;
      limit();
      drawAll();
    });
    if (!weights.some(([weight]) => isSigned(weight))) {
      addControl(root, "", make("small", {},
        "effects of removal were not computed: pass fewer positions=, or trace with attribution=True"));
    }
    return targetSelect;
  }

  // ---- nodes: click or Enter to see ancestors, arrow keys to move ------------------------------

  function addButtons(panel) {
    const [nLayers, , n] = panel.shape, circles = [...panel.part("nodes").children];
    for (const circle of circles) {
      const [level, column] = [Number(circle.dataset.level), Number(circle.dataset.column)];
      const clicked = { panel: panel.index, level, column };
      const isFocus = JSON.stringify(clicked) === JSON.stringify(state.focus);
      const label = nodeText(panel, level, column, live).join(", "), last = level === nLayers && column === n - 1;
      addButton(circle, label, last, () => choose("focus", isFocus ? null : clicked), circles);
      circle.setAttribute("aria-pressed", isFocus);
    }
    [...panel.part("folds").children].forEach((band, i) => {
      const [first, last] = panel.folds[i];
      addButton(band, foldText(panel.folds[i]).join(", "), true, () => {
        for (let layer = first; layer <= last; layer++) data.panels[panel.index].unfolded.push(layer);
        drawAll();
      }, [band]);
    });
  }

  // ---- pointer -------------------------------------------------------------------------------

  // The line nearest to the pointer in its layer: drawn, or else removed.
  function lineAt(panel, event) {
    const point = pointIn(panel.group, event);
    const layer = panel.levels.findLastIndex((level) => level >= point.y);
    const nearest = (lines) => nearestLine(lines.filter((line) => line.layer === layer), point);
    return nearest(panel.view.lines) ?? nearest(panel.removed);
  }

  function tooltipAt(panel, event) {
    svg.style.cursor = "";
    const { level, column, last } = event.target.dataset;
    if (event.target.tagName === "circle") return nodeText(panel, Number(level), Number(column), live);
    if (last) return foldText(panel.folds.find((fold) => fold[1] === Number(last)));
    const line = lineAt(panel, event);
    if (!line) return null;
    if (live.onEdges) svg.style.cursor = "pointer";
    const isRemoved = panel.removed.includes(line);
    const width = isRemoved ? 2.4 : Math.max(2, drawn.layout.styles[line.style][2]);
    setAttributes(panel.hover, { d: line.d, "stroke-width": width });
    return isRemoved ? removedText(panel, line) : edgeText(panel, line, data, state, live);
  }

  // A click on a predicted token in the output row chooses it. A line of a live figure represents the
  // edge in every head at or above the threshold.
  function onClick(event) {
    const { target } = event.target.closest("text[data-target]")?.dataset ?? {};
    if (target) {
      targetSelect.value = target;
      choose("target", Number(target));
    }
    const panel = live.onEdges && panelAt(panels, event);
    const line = panel && !event.target.closest("circle, [data-last]") && lineAt(panel, event);
    if (!line) return;
    const { layer, query, key } = line, heads = line.heads ?? [line.head, ...line.others];
    live.onEdges(panel.index, heads.map((head) => [layer, head, query, key]));
  }

  const targetSelect = addControls();
  svg.setAttribute("role", "group");
  svg.addEventListener("click", onClick);
  svg.addEventListener("pointermove", (event) => {
    hideTip(root, panels);
    const panel = panelAt(panels, event);
    const lines = panel && tooltipAt(panel, event);
    if (lines) showTip(root, lines, event);
  });
  svg.addEventListener("pointerleave", () => hideTip(root, panels));
  onEscape(root, () => choose("focus", null));
  drawAll();
}

// A selector for the element with the keyboard focus inside another.
function focusedIn(element) {
  const active = document.activeElement;
  if (!active || !element.contains(active)) return null;
  if (active.name) return `[name="${active.name}"]`;
  const { level, column } = active.dataset, panel = active.closest("g[data-panel]")?.dataset.panel;
  return level && `g[data-panel="${panel}"] circle[data-level="${level}"][data-column="${column}"]`;
}

const foldText = (fold) => [`Layers ${fold.join(" to ")}`, "nothing is drawn here", "click to unfold"];
