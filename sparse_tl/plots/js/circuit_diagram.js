// Makes the static circuit diagram interactive. attention_edges.js chooses the edges, and all
// coordinates come from attention_svg.py.
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
  const REMOVED = "#c2410c";
  const MARGIN = 8;
  const svg = root.querySelector("svg");
  const panels = findPanels(svg, data, REMOVED);
  // Two panels of deep models do not fit on a screen.
  const alone = live.onEdges && panels.length > 1 && panels.some(({ folds }) => folds);
  const state = { ...data.state, focus: null, panel: alone ? 0 : -1, ...live.state };
  // The figure is drawn for the width of a printed page, but larger on screens; a figure of many columns
  // scrolls rather than becoming illegible.
  const { width } = svg.viewBox.baseVal;
  root.style.maxWidth = `${Math.max(900, width)}px`;
  for (const panel of panels) {
    panel.removed = (live.removed ?? [])[panel.index] ?? [];
  }
  const names = panels.flatMap((panel) => [panel.part("layers"), panel.part("caption").parentElement]);
  const reveal = followScrolling(svg, names, () => {
    const ends = data.targets[state.target].map((column) => data.columns[column]);
    return [Math.min(...ends) - 40, Math.max(...ends) + 60];
  });

  // ---- drawing -------------------------------------------------------------------------------

  function draw(panel) {
    const view = (panel.view = selectEdges(panel, data, state));
    foldLayers(svg, data.columns, panels, panel, [...view.lines, ...panel.removed], drawAll);
    drawEdges(panel, view);
    drawRemoved(panel);
    drawNodes(panel, view);
    drawPrediction(panel, view);
    panel.part("caption").textContent = captionText(panel, view, data, state);
    setAttributes(panel.group, {
      ...countsOf(view),
      "data-focus": view.focus ? nodeName(view.focus.level, view.focus.column) : "",
    });
  }

  function drawEdges(panel, view) {
    const drawn = linePaths(panel, view, data).map((path) =>
      makePath({ ...path, opacity: view.focus && path["data-kind"] === "open" ? 0.35 : null }));
    panel.part("edges").replaceChildren(...drawn);
  }

  // Removed edges of a live figure remain visible as dashed lines.
  function drawRemoved(panel) {
    for (const line of panel.removed) line.d = edgePath(panel, data, line);
    const d = panel.removed.map((line) => line.d).join("");
    panel.part("removed")?.remove();
    if (d) {
      panel.hover.before(makePath({
        "data-role": "removed", d, fill: "none", stroke: REMOVED, "stroke-width": 1.6,
        "stroke-dasharray": "5 4",
      }));
    }
  }

  function drawNodes(panel, view) {
    const ends = lineEnds(view);
    for (const circle of panel.part("nodes").children) {
      const level = Number(circle.dataset.level);
      const column = Number(circle.dataset.column);
      const name = nodeName(level, column);
      const reached = view.reached.has(name);
      const [fill, stroke] = data.paint[reached ? "reached" : "unreached"];
      const isFocus = view.focus?.level === level && view.focus.column === column;
      setAttributes(circle, {
        "data-reached": reached, fill: isFocus ? stroke : fill, stroke,
        r: panel.radii[Number(ends.has(name))],
        opacity: view.focus && !reached ? 0.35 : 1,
        "aria-pressed": isFocus,
      });
    }
    panel.part("residual-path").setAttribute("d", residualPath(panel, view, data));
  }

  function drawPrediction(panel, view) {
    const [nLayers] = panel.shape;
    for (const role of ["input", "output"]) {
      const level = role === "input" ? 0 : nLayers;
      [...panel.part(role).children].forEach((text, column) => {
        const dimmed = view.focus && !view.reached.has(nodeName(level, column));
        const predicted = role === "output" && column === view.column;
        setAttributes(text, {
          opacity: dimmed ? 0.3 : null, "font-weight": predicted ? "bold" : null,
          fill: predicted ? data.paint.predicted : null,
        });
      });
    }
    for (const column of data.given) writeOutput(panel, column, column === view.column);
    const [line, head] = panel.arrows[state.target];
    setAttributes(panel.part("arrow"), { d: line, opacity: view.focus ? 0.3 : null });
    setAttributes(panel.part("arrow-head"), { d: head, opacity: view.focus ? 0.3 : null });
  }

  // Writes above a column the token that the model was given there or, if the column is the chosen
  // one, the prediction.
  function writeOutput(panel, column, isChosen) {
    const text = panel.part("output").children[column];
    const [title] = text.children;
    const given = panel.part("input").children[column].firstChild.data;
    title.textContent = (isChosen ? panel.output : panel.input)[column];
    text.replaceChildren(isChosen ? panel.above[column] : given, title);
  }

  function drawAll() {
    const { target } = root.dataset; // undefined at first, before layout
    if (target && target !== String(state.target)) reveal();
    hideTip(root, panels);
    panels.forEach(draw);
    frame();
    svg.querySelector("[data-legend=negative]")
      ?.setAttribute("visibility", isSigned(state.weight) ? "visible" : "hidden");
    const estimated = panels.some((panel) => panel.view.lines.some((line) => line.estimated));
    svg.querySelector("[data-legend=estimate]")
      ?.setAttribute("visibility", estimated ? "visible" : "hidden");
    setAttributes(root, {
      "data-target": state.target, "data-weight": state.weight, "data-head": state.head,
      "data-threshold": thresholdText(data, state),
    });
    live.onState?.(state);
  }

  // Shows all panels, or one alone with the legend below it.
  function frame() {
    const one = panels[state.panel];
    const legend = svg.querySelector("[data-role=legend]");
    const [width, height] = ["width", "height"].map((name) => Number(svg.getAttribute(name)));
    const box = ({ group }) => {
      const [x, y, , tall] = ["x", "y", "width", "height"]
        .map((name) => Number(group.querySelector("rect").getAttribute(name)));
      const top = y + Number(group.dataset.moved ?? 0);
      return { left: x - MARGIN, top: top - MARGIN, bottom: top + tall };
    };
    const { bottom: lowest } = box(panels.at(-1));
    const { left, top, bottom } = one ? box(one) : { left: 0, top: 0, bottom: lowest };
    for (const { group } of panels) {
      setAttributes(group, { display: !one || group === one.group ? null : "none" });
    }
    for (const arrow of svg.querySelectorAll("[data-role^=transition]")) {
      setAttributes(arrow, { display: one ? "none" : null });
    }
    legend.style.translate = `0 ${bottom - lowest}px`;
    setAttributes(svg, {
      viewBox: `${left} ${top} ${width - left} ${height - top - lowest + bottom}`,
      preserveAspectRatio: "xMidYMin",
    });
    svg.style.minWidth = `${Math.ceil(0.92 * (width - left))}px`;
    root.toggleAttribute("data-alone", Boolean(one) || panels.length === 1);
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
      const outputs = [...new Set(panels.map((panel) => quoted(panel.output[column])))];
      return [target, `${outputs.join(" / ")}  position ${column}`];
    });
    const others = (live.positions ?? []).map((column) =>
      [`+${column}`, `position ${column} (${quoted(panels[0].input[column])} in the prompt)`]);
    const targetSelect = addSelect(root, "Predicted token", "target", [...tokens, ...others],
      state.target, (value) => {
        if (value.startsWith("+")) live.onPosition(Number(value));
        else choose("target", Number(value));
      });
    if (live.onEdges && panels.length > 1) {
      addSelect(root, "Model", "panel", [[-1, "all"], ...panels.map(({ name, index }) => [index, name])],
        state.panel, (value) => choose("panel", Number(value)));
    }
    const nHeads = Math.max(...panels.map((panel) => panel.shape[1]));
    const heads = Array.from({ length: nHeads }, (_, head) => [head, `head ${head}`]);
    addSelect(root, "Heads", "head", [[-1, "all (largest)"], ...heads], state.head,
      (value) => choose("head", Number(value)));
    const some = (kind) => panels.some((panel) => panel.weights[kind]);
    const all = panels.every((panel) => panel.weights["first-order"]);
    const weights = [
      ["attention", "attention"],
      ...(panels.every((panel) => panel.weights.carried) ? [["carried", "what it carries"]] : []),
      // A running kernel computes effects on request.
      ...((some("effect") || live.onEdges) && (all || panels.every((panel) => panel.weights.effect))
        ? [["effect", "effect of removal"]] : []),
      ...(all ? [["first-order", "first-order attribution"]] : []),
    ];
    if (weights.length > 1) {
      addSelect(root, "Weight", "weight", weights, state.weight, (value) => {
        state.weight = value;
        limit();
        drawAll();
      });
    }
    if (!weights.some(([weight]) => isSigned(weight))) {
      addControl(root, weights.length > 1 ? "" : "Weight: attention ", make("small", {},
        "effects of removal were not computed: pass fewer positions=, or trace with attribution=True"));
    }
    return targetSelect;
  }

  // A click on a predicted token in the output row chooses it.
  function addTargetClicks(targetSelect) {
    data.targets.forEach(([column], target) => {
      for (const panel of panels) {
        const text = panel.part("output").children[column];
        text.setAttribute("data-target", target);
        text.addEventListener("click", () => {
          targetSelect.value = String(target);
          choose("target", target);
        });
      }
    });
  }

  // ---- nodes: click or Enter to see ancestors, arrow keys to move ------------------------------

  function addNodes(panel) {
    const [nLayers, , n] = panel.shape;
    const circles = [...panel.part("nodes").children];
    for (const circle of circles) {
      const level = Number(circle.dataset.level);
      const column = Number(circle.dataset.column);
      const press = () => {
        const clicked = { panel: panel.index, level, column };
        state.focus = JSON.stringify(clicked) === JSON.stringify(state.focus) ? null : clicked;
        drawAll();
      };
      const label = nodeText(panel, level, column, live).join(", ");
      const last = level === nLayers && column === n - 1;
      addButton(circle, label, last, press, circles);
    }
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
    if (event.target.tagName === "circle") {
      const { level, column } = event.target.dataset;
      return nodeText(panel, Number(level), Number(column), live);
    }
    if (event.target.dataset.last) return foldText(panel, event.target);
    const line = lineAt(panel, event);
    if (!line) return null;
    if (live.onEdges) svg.style.cursor = "pointer";
    const isRemoved = panel.removed.includes(line);
    const width = isRemoved ? 2.4 : Math.max(2, data.styles[line.style][2]);
    setAttributes(panel.hover, { d: line.d, "stroke-width": width });
    return isRemoved ? removedText(panel, line) : edgeText(panel, line, data, state, live);
  }

  // A line represents the edge in every head at or above the threshold.
  function onClick(event) {
    const panel = panelAt(panels, event);
    const line = panel && !event.target.closest("circle, [data-last]") && lineAt(panel, event);
    if (!line) return;
    const { layer, query, key } = line;
    const heads = line.heads ?? [line.head, ...line.others];
    live.onEdges(panel.index, heads.map((head) => [layer, head, query, key]));
  }

  addTargetClicks(addControls());
  panels.forEach(addNodes);
  if (live.onEdges) svg.addEventListener("click", onClick);
  svg.setAttribute("role", "group");
  svg.addEventListener("pointermove", (event) => {
    hideTip(root, panels);
    const panel = panelAt(panels, event);
    const lines = panel && tooltipAt(panel, event);
    if (lines) showTip(root, lines, event);
  });
  svg.addEventListener("pointerleave", () => hideTip(root, panels));
  onEscape(root, () => {
    state.focus = null;
    drawAll();
  });
  drawAll();
}
