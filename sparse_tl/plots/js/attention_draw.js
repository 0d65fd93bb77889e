// Draws a circuit diagram as markup: in the browser, and in Python for static files. attention_edges.js
// chooses the edges, attention_layout.js computes all places.

// The initial view, for static figures: its width, height and markup.
function firstView(data) {
  const { layout, height, markup } = drawFigure(data, data.state);
  return [layout.width, height, markup];
}

// The layout, the height and the markup of a figure.
function drawFigure(data, state) {
  const { panels, layout } = layOut(data, state), { left, right, width } = layout, { ink, muted } = data.colours;
  const parts = panels.map((panel) => drawPanel(data, state, layout, panel));
  if (data.transition && panels.length > 1) parts.push(...arrowsDown(panels, left, data.transition, ink));
  const { top, height } = panels.at(-1), entries = legendOf(data, state, panels);
  const [legend, bottom] = legendMarkup(entries, left, right, top + height, muted);
  return { panels, layout, height: bottom, markup: figureMarkup(width, bottom, data.title, [...parts, legend]) };
}

function drawPanel(data, state, layout, panel) {
  const { view, levels } = panel, { colours } = data, [nLayers] = panel.shape, { focus } = view;
  const frame = frameOf({ ...panel, left: layout.left, right: layout.right }, panel.name,
    [captionText(panel, view, data, state)], 11, colours);
  const rule = { fill: "none", "stroke-width": 1.4 };
  const streams = layout.x.map((x) => `M${x} ${levels[0]}V${levels[nLayers]}`).join("");
  const lines = linePaths(panel, layout, data.steps).map((path) => svgElement("path",
    { ...path, opacity: focus && path["data-kind"] === "open" ? 0.35 : null }));
  const removed = (panel.removed ?? []).map((line) => (line.d = edgePath(panel, layout, line))).join("");
  const [line, head] = predictionArrow(layout, panel, data.targets[state.target]);
  const faint = focus ? 0.3 : null;
  return svgElement("g", {
    "data-panel": panel.index, ...countsOf(view),
    "data-focus": focus ? nodeName(focus.level, focus.column) : "",
  }, ...frame,
  svgElement("path", { "data-role": "residual", d: streams, ...rule, stroke: colours.residual }),
  svgElement("path", { "data-role": "residual-path", d: residualPath(panel, layout), ...rule,
    stroke: colours.residualPath }),
  svgElement("g", { "data-role": "folds", fill: colours.band, stroke: colours.border }, ...bandsOf(layout, panel)),
  svgElement("g", { "data-role": "edges", fill: "none", "stroke-linecap": "round" }, ...lines),
  removed && svgElement("path", { "data-role": "removed", d: removed, fill: "none", stroke: "#c2410c",
    "stroke-width": 1.6, "stroke-dasharray": "5 4" }),
  svgElement("g", { "data-role": "nodes", "stroke-width": 1.4 }, ...nodesOf(layout, panel, colours)),
  ...squaresOf(layout, panel, colours),
  // With an outline, since scrolling pages move names over lines.
  svgElement("g", { "data-role": "layers", "text-anchor": "end", "font-size": 12, "paint-order": "stroke",
    stroke: "#ffffff", "stroke-width": 5, "stroke-linejoin": "round" }, ...layerNames(layout, panel)),
  tokenRow("input", panel.input, panel.inputY, data, layout, panel),
  tokenRow("output", panel.output.map((text, column) =>
    (data.given.includes(column) && column !== view.column ? panel.input[column] : text)), panel.outputY,
  data, layout, panel),
  svgElement("path", { "data-role": "arrow", d: line, fill: "none", stroke: colours.ink, "stroke-width": 1.8,
    opacity: faint }),
  svgElement("path", { "data-role": "arrow-head", d: head, fill: colours.ink, opacity: faint }));
}

// ---- parts of a panel --------------------------------------------------------------------------

// A band over the residual streams in place of each run of folded layers.
function bandsOf({ x }, { folds, levels, row, radii }) {
  const height = row - 2 * radii[1] - 4, width = x.at(-1) - x[0] + 28;
  return folds.map(([, last]) => svgElement("rect", { "data-last": last, x: x[0] - 14,
    y: levels[last + 1] + (row - height) / 2, width, height, rx: 3, "stroke-dasharray": "3 3" }));
}

function nodesOf({ x }, panel, { reached, unreached }) {
  const { view, levels, radii } = panel, { focus } = view, ends = lineEnds(view);
  return levels.flatMap((y, level) => (panel.hidden(level) ? [] : x.map((middle, column) => {
    const name = nodeName(level, column), isReached = view.reached.has(name);
    const [fill, stroke] = isReached ? reached : unreached;
    return svgElement("circle", {
      "data-level": level, "data-column": column, "data-reached": isReached, cx: middle, cy: y,
      r: radii[Number(ends.has(name))], stroke,
      fill: focus?.level === level && focus.column === column ? stroke : fill,
      opacity: focus ? (isReached ? 1 : 0.35) : null,
    });
  })));
}

// A square below each node that an open MLP writes to; closed MLPs are not drawn.
function squaresOf({ x }, { mlps, levels, radii: [, radius] }, { mlp: [fill, stroke] }) {
  const side = 1.5 * radius;
  const squares = mlps.map(([layer, column]) => svgElement("rect", {
    x: x[column] - side / 2, y: levels[layer + 1] + radius + 2, width: side, height: side, rx: 1,
  }, svgElement("title", {}, `MLP of layer ${layer}, open`)));
  return squares.length
    ? [svgElement("g", { "data-role": "mlps", fill, stroke, "stroke-width": 1.4 }, ...squares)] : [];
}

function layerNames({ x }, { shape: [nLayers], folds, levels, row }) {
  const step = Math.ceil(12 / row); // names of low rows would overlap
  const inFold = (layer) => folds.find(([first, last]) => first <= layer && layer <= last);
  return Array.from({ length: nLayers }, (_, layer) => {
    const fold = inFold(layer);
    const text = fold ? (fold[1] === layer ? `Layers ${fold.join("\u2013")}` : "")
      : layer % step === 0 ? `Layer ${layer}` : "";
    return text && svgText({ x: x[0] - 24, y: levels[layer + 1] + 4.5 }, text);
  });
}

function tokenRow(role, texts, y, data, layout, { shape: [nLayers], view }) {
  const { turned, tokenSize, tokenWidth } = layout, level = role === "input" ? 0 : nLayers;
  const tokens = texts.map((text, column) => {
    const x = layout.x[column], isPredicted = role === "output" && column === view.column;
    const lean = x + (role === "input" ? 4 : 2);
    const place = turned ? { transform: `translate(${lean} ${y}) rotate(-45)` } : { x, y };
    const target = role === "output" ? data.targets.findIndex(([predicted]) => predicted === column) : -1;
    return svgElement("text", {
      "data-column": column, "data-target": target < 0 ? null : target, ...place,
      "font-weight": isPredicted ? "bold" : null, fill: isPredicted ? data.colours.accent : null,
      opacity: view.focus && !view.reached.has(nodeName(level, column)) ? 0.3 : null,
    }, escaped(clipText(text, tokenSize, tokenWidth)), svgElement("title", {}, escaped(text)));
  });
  const anchor = !turned ? "middle" : role === "input" ? "end" : "start";
  return svgElement("g", { "data-role": role, "font-size": tokenSize, "text-anchor": anchor }, ...tokens);
}

// The arrow at a predicted token: line and head, as path data. It leads from the column where the token
// is computed to the predicted column. If both are the same, it curves from the last node round the
// token's side, or is straight in narrow columns.
function predictionArrow({ x, hook, turned, tokenSize }, { levels, radii, outputY }, [column, readAt]) {
  const [endX, startX] = [x[column], x[readAt]], node = levels.at(-1) - radii[1] - 3, size = 8;
  if (hook !== null && column === readAt) {
    const [tipX, tipY] = [endX + hook, outputY - 0.35 * tokenSize];
    return [pathData([startX + 5, node + 3], [tipX + 17, node - 4], [tipX + 17, tipY], [tipX + 0.6 * size, tipY]),
      arrowHead(tipX, tipY, Math.PI, size)];
  }
  if (turned || column === readAt) {
    const tip = outputY + 7, bend = 0.7 * (node - tip);
    return [pathData([startX, node], [startX, node - bend], [endX, tip + size + bend], [endX, tip + 0.6 * size]),
      arrowHead(endX, tip, -Math.PI / 2, size)];
  }
  const base = outputY - 0.8 * tokenSize - 4;
  const inset = Math.min(6, 0.1 * Math.abs(endX - startX)) * Math.sign(endX - startX);
  const [from, to] = [startX + inset, endX - 0.5 * inset];
  return [pathData([from, base], [from, base - 18], [to, base - 22], [to, base - 4]),
    arrowHead(to, base + 1, Math.PI / 2, size)];
}

const decimals = (number) => Math.round(100 * number) / 100;

const pathData = (start, ...others) =>
  `M${start.map(decimals).join(" ")}C${others.map((point) => point.map(decimals).join(" ")).join(" ")}`;

// A filled arrow head with its tip at (x, y); angle in radians.
function arrowHead(x, y, angle, size) {
  const corners = [[2.7, 1], [Math.PI, 0.72], [-2.7, 1]].map(([turn, reach]) =>
    [x + size * reach * Math.cos(angle + turn), y + size * reach * Math.sin(angle + turn)]);
  return `M${[[x, y], ...corners].map((corner) => corner.map(decimals).join(" ")).join("L")}Z`;
}

// ---- legend ------------------------------------------------------------------------------------

// Symbol, text and role of each entry.
function legendOf({ colours, panels: all }, state, panels) {
  const { lines, ink, residualPath: rule, mlp } = colours;
  const circle = ([fill, stroke]) => svgElement("circle", { cx: 10, cy: 0, r: 4.5, fill, stroke, "stroke-width": 1.4 });
  const bow = svgElement("path", { d: "M0 6C2 -12 17 -14 18 -3", fill: "none", stroke: ink, "stroke-width": 1.8 });
  const entries = [
    [lineSample(lines.main[0][1], 4, { "stroke-linecap": "round" }), "carries most to the prediction", "main"],
    [lineSample(lines.path[0][1], 2), "leads to it", "path"],
    [lineSample(lines.open[0][1], 1.6), "does not lead to it", "open"],
    [circle(colours.reached), "feeds the prediction", "reached"],
    [circle(colours.unreached), "does not feed it", "unreached"],
    [bow + svgElement("path", { d: arrowHead(18.5, 3, 1.5, 8), fill: ink }), "predicted token", "prediction"],
    [svgElement("path", { d: "M10 9V-9", stroke: rule, "stroke-width": 1.4 }), "residual stream", "residual"],
  ];
  if (all.some(({ mlps }) => mlps.length)) {
    const [fill, stroke] = mlp;
    entries.push([svgElement("rect", { x: 6, y: -4, width: 8, height: 8, rx: 1, fill, stroke }), "open MLP", "mlp"]);
  }
  if (isSigned(state.weight)) entries.push([lineSample(lines.main[1][0], 3), "orange: hurts", "negative"]);
  if (panels.some(({ view }) => view.lines.some((line) => line.estimated))) {
    const dots = { "stroke-dasharray": dotsOf(3), "stroke-linecap": "round" };
    entries.push([lineSample(lines.main[0][1], 3, dots), "dotted: first-order estimate", "estimate"]);
  }
  return entries;
}
