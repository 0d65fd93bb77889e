// Makes the static circuit diagram interactive. What it shows is chosen by attention_edges.js; all
// coordinates come from diagram_layout.py.
//
// A live figure, whose edges can be removed and restored by a running kernel, is started with more:
//   state            what to start with in place of data.state
//   onState(state)   called after every change of it
//   removed          for each panel, the removed edges as {layer, query, key, heads}
//   onEdges(panel, edges)  called with [layer, head, query, key] of each edge of a clicked line

function start(root, data, live) {
  "use strict";
  live ??= {};
  const REMOVED = "#c2410c";
  const svg = root.querySelector("svg");
  const state = { ...data.state, focus: null, ...live.state };
  const panels = findPanels(svg, data, REMOVED);
  for (const panel of panels) {
    panel.edges = unpackEdges(panel);
    panel.removed = (live.removed ?? [])[panel.index] ?? [];
    drawRemoved(panel);
  }

  // ---- drawing -------------------------------------------------------------------------------

  // A straight line, or an arc beside the residual line where an edge stays in its column.
  function edgePath(panel, { layer, query, key }) {
    const [startX, startY] = [data.columns[key], panel.levels[layer]];
    const [endX, endY] = [data.columns[query], panel.levels[layer + 1]];
    if (query !== key) return `M${startX} ${startY}L${endX} ${endY}`;
    const side = startX + data.bow;
    return `M${startX} ${startY}C${side} ${startY - panel.bend} ` +
      `${side} ${endY + panel.bend} ${endX} ${endY}`;
  }

  function gradeOf(value) {
    const grades = data.styles["path+"].length;
    return Math.min(grades - 1, Math.floor(((Math.abs(value) - 1) * grades) / data.steps));
  }

  function draw(panel) {
    const view = (panel.view = selectEdges(panel, data, state));
    for (const line of view.lines) line.d = edgePath(panel, line);
    drawEdges(panel, view);
    drawNodes(panel, view);
    drawPrediction(panel, view);
    panel.part("caption").textContent = captionText(panel, view, data, state);
    const onPath = view.lines.filter((line) => line.onPath).length;
    setAttributes(panel.group, {
      "data-edges-shown": view.lines.length, "data-edges-on-path": onPath,
      "data-attention-edges": view.count,
      "data-focus": view.focus ? `${view.focus.level},${view.focus.column}` : "",
    });
  }

  function drawEdges(panel, view) {
    const groups = new Map();
    for (const line of view.lines) {
      const grade = gradeOf(line.value);
      const negative = line.value < 0 ? 1 : 0;
      const rank = 100 * ["open", "path", "main"].indexOf(line.kind) + 2 * grade + negative;
      if (!groups.has(rank)) groups.set(rank, { kind: line.kind, grade, negative, d: "" });
      groups.get(rank).d += line.d;
    }
    const paths = [...groups.keys()].sort((a, b) => a - b).map((rank) => {
      const { kind, grade, negative, d } = groups.get(rank);
      const [stroke, width] = data.styles[kind + (negative ? "-" : "+")][grade];
      const path = document.createElementNS(SVG, "path");
      setAttributes(path, { "data-kind": kind, d, stroke, "stroke-width": width });
      if (view.focus && kind === "open") path.setAttribute("opacity", "0.35");
      return path;
    });
    panel.part("edges").replaceChildren(...paths);
  }

  // Removed edges of a live figure stay where they were, as broken lines.
  function drawRemoved(panel) {
    if (!panel.removed.length) return;
    for (const line of panel.removed) line.d = edgePath(panel, line);
    const path = document.createElementNS(SVG, "path");
    setAttributes(path, {
      "data-role": "removed", d: panel.removed.map((line) => line.d).join(""),
      fill: "none", stroke: REMOVED, "stroke-width": 1.6, "stroke-dasharray": "5 4",
    });
    panel.hover.before(path);
  }

  function drawNodes(panel, view) {
    let residual = "";
    for (const circle of panel.part("nodes").children) {
      const level = Number(circle.dataset.level);
      const column = Number(circle.dataset.column);
      const reached = view.reached.has(nodeName(level, column));
      const [fill, stroke] = data.paint[reached ? "reached" : "unreached"];
      const isFocus = view.focus && view.focus.level === level && view.focus.column === column;
      setAttributes(circle, {
        "data-reached": reached, fill: isFocus ? stroke : fill, stroke,
        opacity: view.focus && !reached ? 0.35 : 1,
        "aria-pressed": Boolean(isFocus),
      });
      if (reached && level > 0) {
        residual += `M${data.columns[column]} ${panel.levels[level - 1]}V${panel.levels[level]}`;
      }
    }
    panel.part("residual-path").setAttribute("d", residual);
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
    const [line, head] = panel.arrows[state.target];
    setAttributes(panel.part("arrow"), { d: line, opacity: view.focus ? 0.3 : null });
    setAttributes(panel.part("arrow-head"), { d: head, opacity: view.focus ? 0.3 : null });
  }

  function drawAll() {
    hideTip(root, panels);
    panels.forEach(draw);
    setAttributes(root, {
      "data-target": state.target, "data-weight": state.weight, "data-head": state.head,
      "data-threshold": thresholdText(data, state),
    });
    live.onState?.(state);
  }

  // ---- controls ------------------------------------------------------------------------------

  function addChoice(text, name, options, convert) {
    return addSelect(root, text, name, options, state[name], (value) => {
      state[name] = convert(value);
      drawAll();
    });
  }

  function addControls() {
    const range = {
      name: "threshold", max: 0.99, step: 0.01,
      min: data.floor > 1 ? Math.ceil(data.floor / 10) / 100 : 0,
    };
    addSlider(root, "Threshold", range, state.limit / data.steps, thresholdText(data, state), (value) => {
      state.limit = Math.max(data.floor, Math.round(value * data.steps));
      drawAll();
      return thresholdText(data, state);
    });

    const characters = data.targets.map(([column], target) => {
      const outputs = [...new Set(panels.map((panel) => panel.output[column]))];
      return [target, `${outputs.join(" / ")}  (position ${column})`];
    });
    const targetSelect = addChoice("Predicted character", "target", characters, Number);
    const nHeads = Math.max(...panels.map((panel) => panel.shape[1]));
    const heads = Array.from({ length: nHeads }, (_, head) => [head, `head ${head}`]);
    addChoice("Heads", "head", [[-1, "all (largest)"], ...heads], Number);
    const some = (kind) => panels.some((panel) => panel.scores[kind]);
    const all = panels.every((panel) => panel.scores["first-order"]);
    const weights = [
      ["attention", "attention"],
      ...(some("effect") && (all || panels.every((panel) => panel.scores.effect))
        ? [["effect", "effect of removal"]] : []),
      ...(all ? [["first-order", "first-order attribution"]] : []),
    ];
    if (weights.length > 1) addChoice("Weight", "weight", weights, String);
    return targetSelect;
  }

  // A click on a predicted character in the output row chooses it.
  function addTargetClicks(targetSelect) {
    data.targets.forEach(([column], target) => {
      for (const panel of panels) {
        const text = panel.part("output").children[column];
        text.setAttribute("data-target", target);
        text.addEventListener("click", () => {
          state.target = target;
          targetSelect.value = String(target);
          drawAll();
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
        state.focus = toggled(state.focus, { panel: panel.index, level, column });
        drawAll();
      };
      const label = nodeText(panel, level, column, live).join(", ");
      const last = level === nLayers && column === n - 1;
      addButton(circle, label, last, press, circles);
    }
  }

  // ---- pointer -------------------------------------------------------------------------------

  // The panel under the pointer, and the drawn line or else the removed one beside it.
  function underPointer(event) {
    const group = event.target.closest("g[data-panel]");
    if (!group) return {};
    const panel = panels[Number(group.dataset.panel)];
    if (event.target.tagName === "circle") return { panel, circle: event.target };
    const point = pointIn(svg, event);
    const line = nearestLine(panel.view.lines, point);
    return { panel, line, removed: line ? null : nearestLine(panel.removed, point) };
  }

  function onPointerMove(event) {
    hideTip(root, panels);
    const { panel, circle, line, removed } = underPointer(event);
    if (circle) {
      const { level, column } = circle.dataset;
      showTip(root, nodeText(panel, Number(level), Number(column), live), event);
    } else if (line) {
      const [, width] = data.styles["path+"][gradeOf(line.value)];
      setAttributes(panel.hover, { d: line.d, "stroke-width": Math.max(2, width) });
      showTip(root, edgeText(panel, line, data, state, live), event);
    } else if (removed) {
      setAttributes(panel.hover, { d: removed.d, "stroke-width": 2.4 });
      showTip(root, removedText(panel, removed), event);
    }
    svg.style.cursor = live.onEdges && (line || removed) ? "pointer" : "";
  }

  // A line stands for the edge in every head at or above the threshold.
  function onClick(event) {
    const { panel, line, removed } = underPointer(event);
    const found = line ? { ...line, heads: [line.head, ...line.others] } : removed;
    if (!found) return;
    const { layer, query, key } = found;
    live.onEdges(panel.index, found.heads.map((head) => [layer, head, query, key]));
  }

  addTargetClicks(addControls());
  panels.forEach(addNodes);
  if (live.onEdges) svg.addEventListener("click", onClick);
  listen(root, svg, onPointerMove, () => hideTip(root, panels), () => {
    state.focus = null;
    drawAll();
  });
  drawAll();
}
