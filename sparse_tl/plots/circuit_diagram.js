// Makes the static circuit diagram interactive. The lines, the reached nodes and the captions are
// computed by the same rules as in drawn_edges.py; all coordinates come from diagram_layout.py.
//
// A live figure, whose edges can be removed and restored by a running kernel, is started with more:
//   state            what to start with in place of data.state
//   onState(state)   called after every change of it
//   removed          for each panel, the removed edges as {layer, query, key, heads}
//   onEdges(panel, edges)  called with [layer, head, query, key] of each edge of a clicked line

function start(root, data, live) {
  "use strict";
  live ??= {};
  const HOVER_DISTANCE = 7;
  const REMOVED = "#c2410c";
  const svg = root.querySelector("svg");
  const tip = root.querySelector(".tip");
  const state = { ...data.state, focus: null, ...live.state };
  const panels = data.panels.map((panel, index) => {
    const group = svg.querySelector(`g[data-panel="${index}"]`);
    const part = (role) => group.querySelector(`[data-role="${role}"]`);
    return { ...panel, ...unpackEdges(panel), index, group, part, view: null };
  });
  const SCORE_NAMES = { effect: "effect", "first-order": "first-order attribution" };
  for (const panel of panels) {
    panel.hover = addHoverPath(panel.part("nodes"), REMOVED);
    panel.removed = (live.removed ?? [])[panel.index] ?? [];
    drawRemoved(panel);
  }

  // ---- numbers -------------------------------------------------------------------------------

  // Edges are sent as runs of skipped and listed places in [layer, head, query, key].
  function unpackEdges(panel) {
    const [, nHeads, n] = panel.shape;
    const edges = [];
    let place = 0;
    panel.runs.forEach((length, run) => {
      for (const end = place + length; place < end; place++) {
        if (run % 2 === 0) continue;
        const row = Math.floor(place / n);
        const heads = Math.floor(row / n);
        edges.push({
          layer: Math.floor(heads / nHeads), head: heads % nHeads, query: row % n, key: place % n,
        });
      }
    });
    return { edges };
  }

  // Effects that are not known exactly are estimated to first order.
  function shownWeight(panel) {
    return state.weight === "effect" && !panel.scores.effect ? "first-order" : state.weight;
  }

  function weightsOf(panel) {
    const kind = shownWeight(panel);
    return kind === "attention" ? panel.attention : panel.scores[kind].rows[state.target];
  }

  // In logits; below 0 where removing the edge lowers the predicted logit.
  function logitsOf(panel, kind, index) {
    const { rows, scales } = panel.scores[kind];
    const change = (-rows[state.target][index] / data.steps) * scales[state.target];
    return `${change.toFixed(3).replace("-", "\u2212")} logits`;
  }

  // Nodes from which (level, column) can be reached over the kept edges, itself included.
  function ancestors(panel, kept, column, level) {
    const n = panel.shape[2];
    const reached = new Uint8Array((panel.shape[0] + 1) * n);
    reached[level * n + column] = 1;
    for (let layer = level - 1; layer >= 0; layer--) {
      for (let query = 0; query < n; query++) {
        if (!reached[(layer + 1) * n + query]) continue;
        reached[layer * n + query] = 1;
        for (let key = 0; key < n; key++) {
          if (kept[(layer * n + query) * n + key]) reached[layer * n + key] = 1;
        }
      }
    }
    return reached;
  }

  // What a panel shows in the present state. Reachability is the model's, over all heads, also
  // where a single head is shown.
  function selectEdges(panel) {
    const [nLayers, nHeads, n] = panel.shape;
    const weights = weightsOf(panel);
    const kept = new Uint8Array(nLayers * n * n);
    const merged = new Map();
    let count = 0;
    panel.edges.forEach((edge, i) => {
      const size = Math.abs(weights[i]);
      if (size < state.limit) return;
      const place = (edge.layer * n + edge.query) * n + edge.key;
      kept[place] = 1;
      if (state.head >= 0 && edge.head !== state.head) return;
      count++;
      const line = merged.get(place);
      if (!line) merged.set(place, { ...edge, value: weights[i], index: i, others: [] });
      else if (Math.abs(line.value) >= size) line.others.push(edge.head);
      else {
        line.others.push(line.head);
        Object.assign(line, { head: edge.head, value: weights[i], index: i });
      }
    });
    const [column, readAt] = data.targets[state.target];
    const focus = state.focus && state.focus.panel === panel.index ? state.focus : null;
    const reached = focus
      ? ancestors(panel, kept, focus.column, focus.level)
      : ancestors(panel, kept, readAt, nLayers);
    const lines = [...merged.keys()].sort((a, b) => a - b).map((place) => merged.get(place));
    for (const line of lines) {
      line.onPath = reached[(line.layer + 1) * n + line.query] === 1;
      line.kind = line.onPath ? "path" : "open";
      line.d = edgePath(panel, line);
    }
    const start = focus ? focus : { level: nLayers, column: readAt };
    markMainEdges(lines, start, n);
    const headsShown = state.head < 0 ? nHeads : Number(state.head < nHeads);
    const total = nLayers * headsShown * panel.nPairs;
    return { lines, reached, count, total, column, focus };
  }

  // The edges that carry most to the node where the reading starts; see drawn_edges.py.
  function markMainEdges(lines, start, n) {
    let strength = new Float64Array(n);
    strength[start.column] = 1;
    for (let layer = start.level - 1; layer >= 0; layer--) {
      const below = strength.slice();
      for (const line of lines) {
        if (line.layer !== layer) continue;
        line.carried = (Math.abs(line.value) / data.steps) * strength[line.query];
        below[line.key] = Math.max(below[line.key], line.carried);
      }
      strength = below;
    }
    const moving = lines.filter((line) => line.onPath && line.query !== line.key);
    // Sorting is stable: equal ones stay in the order of layer, query and key.
    moving.sort((a, b) => b.carried - a.carried);
    for (const line of moving.slice(0, data.nMain)) line.kind = "main";
  }

  // ---- drawing -------------------------------------------------------------------------------

  // A straight line, or an arc beside the residual line where an edge stays in its column.
  function edgePath(panel, edge) {
    const { startX, startY, endX, endY } = ends(panel, edge);
    if (edge.query !== edge.key) return `M${startX} ${startY}L${endX} ${endY}`;
    const side = startX + data.bow;
    return `M${startX} ${startY}C${side} ${startY - panel.bend} ` +
      `${side} ${endY + panel.bend} ${endX} ${endY}`;
  }

  function ends(panel, edge) {
    return {
      startX: data.columns[edge.key], startY: panel.levels[edge.layer],
      endX: data.columns[edge.query], endY: panel.levels[edge.layer + 1],
    };
  }

  function gradeOf(value) {
    const grades = data.styles["path+"].length;
    return Math.min(grades - 1, Math.floor(((Math.abs(value) - 1) * grades) / data.steps));
  }

  function draw(panel) {
    const view = (panel.view = selectEdges(panel));
    drawEdges(panel, view);
    drawNodes(panel, view);
    drawPrediction(panel, view);
    panel.part("caption").textContent = caption(panel, view);
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
    const path = document.createElementNS(SVG, "path");
    setAttributes(path, {
      "data-role": "removed", d: panel.removed.map((line) => edgePath(panel, line)).join(""),
      fill: "none", stroke: REMOVED, "stroke-width": 1.6, "stroke-dasharray": "5 4",
    });
    panel.hover.before(path);
  }

  function drawNodes(panel, view) {
    const n = panel.shape[2];
    let residual = "";
    for (const circle of panel.part("nodes").children) {
      const level = Number(circle.dataset.level);
      const column = Number(circle.dataset.column);
      const reached = view.reached[level * n + column] === 1;
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
    const n = panel.shape[2];
    const [nLayers] = panel.shape;
    for (const role of ["input", "output"]) {
      const level = role === "input" ? 0 : nLayers;
      [...panel.part(role).children].forEach((text, column) => {
        const dimmed = view.focus && !view.reached[level * n + column];
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

  function caption(panel, view) {
    const number = (value) => value.toLocaleString("en-US");
    const name = SCORE_NAMES[shownWeight(panel)];
    const share = name ? ` of the largest ${name}; orange: hurts` : "";
    return `${number(view.count)} of ${number(view.total)} attention edges \u2265 ` +
      thresholdText() + share;
  }

  function thresholdText() {
    return (state.limit / data.steps).toFixed(state.limit % 10 ? 3 : 2);
  }

  function drawAll() {
    hideTip();
    panels.forEach(draw);
    setAttributes(root, {
      "data-target": state.target, "data-weight": state.weight, "data-head": state.head,
      "data-threshold": thresholdText(),
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
    addSlider(root, "Threshold", range, state.limit / data.steps, thresholdText(), (value) => {
      state.limit = Math.max(data.floor, Math.round(value * data.steps));
      drawAll();
      return thresholdText();
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
    const at = (level, column) => circles[level * n + column];
    for (const circle of circles) {
      const level = Number(circle.dataset.level);
      const column = Number(circle.dataset.column);
      setAttributes(circle, {
        tabindex: level === nLayers && column === n - 1 ? 0 : -1, role: "button",
        "aria-label": nodeText(panel, level, column).join(", "),
      });
      circle.addEventListener("click", () => toggleFocus(panel, level, column));
      circle.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          toggleFocus(panel, level, column);
          event.preventDefault();
          return;
        }
        const step = {
          ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
        }[event.key];
        const next = step && at(level + step[0], column + step[1]);
        const inRow = step && column + step[1] >= 0 && column + step[1] < n;
        if (!next || !inRow) return;
        circle.setAttribute("tabindex", -1);
        next.setAttribute("tabindex", 0);
        next.focus();
        event.preventDefault();
      });
    }
  }

  function toggleFocus(panel, level, column) {
    const old = state.focus;
    const same = old && old.panel === panel.index && old.level === level && old.column === column;
    state.focus = same ? null : { panel: panel.index, level, column };
    drawAll();
  }

  // ---- tooltip -------------------------------------------------------------------------------

  function nodeText(panel, level, column) {
    const place = level === 0 ? "Input" : `After layer ${level - 1}`;
    const hint = live.onEdges ? ["click: what it attends to and predicts"] : [];
    return [place, ...tokenText(panel, column, "position"), ...hint];
  }

  function tokenText(panel, column, label) {
    const known = panel.input[column] === panel.output[column];
    const output = known ? "" : `, output \u201c${panel.output[column]}\u201d`;
    return [`${label} ${column}: \u201c${panel.input[column]}\u201d${output}`];
  }

  function edgeText(panel, line) {
    const attention = panel.attention[line.index] / data.steps;
    const text = [
      `Layer ${line.layer}, head ${line.head}`,
      ...tokenText(panel, line.key, "from position"),
      ...tokenText(panel, line.query, "to position"),
      `attention ${attention.toFixed(3)}, gate open`,
    ];
    const { effect, "first-order": estimate } = panel.scores;
    if (effect) text.push(`effect of removing it ${logitsOf(panel, "effect", line.index)}`);
    if (estimate) {
      text.push(`first-order attribution ${logitsOf(panel, "first-order", line.index)}`);
    }
    if (line.others.length) {
      const heads = line.others.sort((a, b) => a - b).join(", ");
      text.push(`weaker here: head${line.others.length > 1 ? "s" : ""} ${heads}`);
    }
    const all = line.others.length ? " in all these heads" : "";
    return live.onEdges ? [...text, `click: remove this edge${all}`] : text;
  }

  function removedText(panel, line) {
    return [
      `Removed: layer ${line.layer}, head${line.heads.length > 1 ? "s" : ""} ${line.heads.join(", ")}`,
      ...tokenText(panel, line.key, "from position"),
      ...tokenText(panel, line.query, "to position"),
      "click: restore",
    ];
  }

  function clearHover() {
    for (const panel of panels) panel.hover.removeAttribute("d");
  }

  function hideTip() {
    tip.hidden = true;
    clearHover();
  }

  // The line nearest to a point; lines on the path win over light ones at about the same distance.
  function nearestLine(panel, lines, x, y) {
    let best = null;
    let bestDistance = HOVER_DISTANCE;
    for (const line of lines) {
      const { startX, startY, endX, endY } = ends(panel, line);
      if (y > startY + 3 || y < endY - 3) continue;
      // The middle of an arc is three quarters of the way to its control points.
      const aside = line.query === line.key ? 0.75 * data.bow : 0;
      const [midX, midY] = [(startX + endX) / 2 + aside, (startY + endY) / 2];
      const distance = Math.min(
        distanceToSegment(x, y, startX, startY, midX, midY),
        distanceToSegment(x, y, midX, midY, endX, endY),
      ) - (line.onPath ? 2 : 0);
      if (distance < bestDistance) [best, bestDistance] = [line, distance];
    }
    return best;
  }

  // The panel under the pointer, and the drawn line or else the removed one beside it.
  function underPointer(event) {
    const group = event.target.closest("g[data-panel]");
    if (!group) return {};
    const panel = panels[Number(group.dataset.panel)];
    if (event.target.tagName === "circle") return { panel, circle: event.target };
    const { x, y } = pointIn(svg, event);
    const line = nearestLine(panel, panel.view.lines, x, y);
    return { panel, line, removed: line ? null : nearestLine(panel, panel.removed, x, y) };
  }

  function onPointerMove(event) {
    hideTip();
    const { panel, circle, line, removed } = underPointer(event);
    if (circle) {
      const { level, column } = circle.dataset;
      showTip(root, nodeText(panel, Number(level), Number(column)), event);
    } else if (line) {
      const [, width] = data.styles["path+"][gradeOf(line.value)];
      setAttributes(panel.hover, { d: line.d, "stroke-width": Math.max(2, width) });
      showTip(root, edgeText(panel, line), event);
    } else if (removed) {
      setAttributes(panel.hover, { d: edgePath(panel, removed), "stroke-width": 2.4 });
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
  svg.setAttribute("role", "group");
  svg.addEventListener("pointermove", onPointerMove);
  svg.addEventListener("pointerleave", hideTip);
  if (live.onEdges) svg.addEventListener("click", onClick);
  onEscape(root, () => {
    state.focus = null;
    drawAll();
  });
  drawAll();
}
