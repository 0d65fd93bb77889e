// Which attention edges a circuit diagram shows, which of them lead to the prediction, by the rules
// of drawn_edges.py, and what it says of them.

const nodeName = (level, column) => `${level},${column}`;

// Edges are sent as the steps between their places in [layer, head, query, key].
function unpackEdges({ shape: [, nHeads, n], steps }) {
  let place = 0;
  return steps.map((step) => {
    place += step;
    const row = Math.floor(place / n);
    const heads = Math.floor(row / n);
    const [layer, query, key] = [Math.floor(heads / nHeads), row % n, place % n];
    const [source, reader] = [nodeName(layer, key), nodeName(layer + 1, query)];
    return { layer, head: heads % nHeads, query, key, source, reader };
  });
}

// The steps up the residual stream, which carry everything.
function residualSteps({ shape: [nLayers, , n] }, value) {
  return Array.from({ length: nLayers * n }, (_, i) => {
    const [layer, column] = [Math.floor(i / n), i % n];
    return { layer, value, source: nodeName(layer, column), reader: nodeName(layer + 1, column) };
  });
}

// Effects that are not known exactly are estimated to first order.
function shownWeight(panel, state) {
  return state.weight === "effect" && !panel.scores.effect ? "first-order" : state.weight;
}

// What a panel shows in the present state. Reachability is the model's, over all heads, also
// where a single head is shown.
function selectEdges(panel, data, state) {
  const [nLayers, nHeads, n] = panel.shape;
  const kind = shownWeight(panel, state);
  const weights = kind === "attention" ? panel.attention : panel.scores[kind].rows[state.target];
  const residual = residualSteps(panel, data.steps);
  const kept = [...residual];
  const merged = new Map();
  let count = 0;
  panel.edges.forEach((edge, index) => {
    const value = weights[index];
    if (Math.abs(value) < state.limit) return;
    kept.push(edge);
    if (state.head >= 0 && edge.head !== state.head) return;
    count++;
    const place = (edge.layer * n + edge.query) * n + edge.key;
    const line = merged.get(place);
    if (!line) merged.set(place, { ...edge, value, index, others: [] });
    else if (Math.abs(line.value) >= Math.abs(value)) line.others.push(edge.head);
    else {
      line.others.push(line.head);
      Object.assign(line, { head: edge.head, value, index });
    }
  });
  const [column, readAt] = data.targets[state.target];
  const focus = state.focus?.panel === panel.index ? state.focus : null;
  const start = focus ? nodeName(focus.level, focus.column) : nodeName(nLayers, readAt);
  const reached = reach(kept, start, false);
  const lines = [...merged.keys()].sort((a, b) => a - b).map((place) => merged.get(place));
  for (const line of lines) {
    line.onPath = reached.has(line.reader);
    line.kind = line.onPath ? "path" : "open";
  }
  markMainEdges(lines, residual, start, data);
  const headsShown = state.head < 0 ? nHeads : Number(state.head < nHeads);
  const total = nLayers * headsShown * panel.nPairs;
  return { lines, reached, count, total, column, focus };
}

// The edges that carry most to the node where the reading starts.
function markMainEdges(lines, residual, start, data) {
  const strength = new Map([[start, 1]]);
  for (const line of [...lines, ...residual].sort((a, b) => b.layer - a.layer)) {
    line.carried = (Math.abs(line.value) / data.steps) * (strength.get(line.reader) ?? 0);
    strength.set(line.source, Math.max(strength.get(line.source) ?? 0, line.carried));
  }
  const moving = lines.filter((line) => line.onPath && line.query !== line.key);
  // Sorting is stable: equal ones stay in the order of layer, query and key.
  moving.sort((a, b) => b.carried - a.carried);
  for (const line of moving.slice(0, data.nMain)) line.kind = "main";
}

// ---- what is said: captions, and tooltips of lines of text, the first the heading -------------

function captionText(panel, view, data, state) {
  const scoreNames = { effect: "effect", "first-order": "first-order attribution" };
  const number = (value) => value.toLocaleString("en-US");
  const name = scoreNames[shownWeight(panel, state)];
  const share = name ? ` of the largest ${name}; orange: hurts` : "";
  return `${number(view.count)} of ${number(view.total)} attention edges \u2265 ` +
    thresholdText(data, state) + share + panel.mlps;
}

function thresholdText(data, state) {
  return (state.limit / data.steps).toFixed(state.limit % 10 ? 3 : 2);
}

// In logits; below 0 where removing the edge lowers the predicted logit.
function logitsOf(panel, kind, index, data, state) {
  const { rows, scales } = panel.scores[kind];
  const change = (-rows[state.target][index] / data.steps) * scales[state.target];
  return `${change.toFixed(3).replace("-", "\u2212")} logits`;
}

function nodeText(panel, level, column, live) {
  const place = level === 0 ? "Input" : `After layer ${level - 1}`;
  const hint = live.onEdges ? ["click: what it attends to and predicts"] : [];
  return [place, ...tokenText(panel, column, "position"), ...hint];
}

function tokenText(panel, column, label) {
  const known = panel.input[column] === panel.output[column];
  const output = known ? "" : `, output \u201c${panel.output[column]}\u201d`;
  return [`${label} ${column}: \u201c${panel.input[column]}\u201d${output}`];
}

function edgeText(panel, line, data, state, live) {
  const attention = panel.attention[line.index] / data.steps;
  const text = [
    `Layer ${line.layer}, head ${line.head}`,
    ...tokenText(panel, line.key, "from position"),
    ...tokenText(panel, line.query, "to position"),
    `attention ${attention.toFixed(3)}, gate open`,
  ];
  const { effect, "first-order": estimate } = panel.scores;
  const logits = (kind) => logitsOf(panel, kind, line.index, data, state);
  if (effect) text.push(`effect of removing it ${logits("effect")}`);
  if (estimate) text.push(`first-order attribution ${logits("first-order")}`);
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
