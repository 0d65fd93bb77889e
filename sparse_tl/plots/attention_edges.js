// Which attention edges a circuit diagram shows, and which of them lead to the prediction, by the
// rules of drawn_edges.py.

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

// Effects that are not known exactly are estimated to first order.
function shownWeight(panel, state) {
  return state.weight === "effect" && !panel.scores.effect ? "first-order" : state.weight;
}

function weightsOf(panel, state) {
  const kind = shownWeight(panel, state);
  return kind === "attention" ? panel.attention : panel.scores[kind].rows[state.target];
}

const nodeName = (level, column) => `${level},${column}`;

// The steps up the residual stream.
function residualLines([nLayers, , n]) {
  return Array.from({ length: nLayers * n }, (_, i) => {
    const [layer, column] = [Math.floor(i / n), i % n];
    return { source: nodeName(layer, column), reader: nodeName(layer + 1, column) };
  });
}

// What a panel shows in the present state. Reachability is the model's, over all heads, also
// where a single head is shown.
function selectEdges(panel, data, state) {
  const [nLayers, nHeads, n] = panel.shape;
  const weights = weightsOf(panel, state);
  const kept = residualLines(panel.shape);
  const merged = new Map();
  let count = 0;
  panel.edges.forEach((edge, i) => {
    const size = Math.abs(weights[i]);
    if (size < state.limit) return;
    kept.push(edge);
    if (state.head >= 0 && edge.head !== state.head) return;
    count++;
    const place = (edge.layer * n + edge.query) * n + edge.key;
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
  const start = focus ?? { level: nLayers, column: readAt };
  const reached = reach(kept, nodeName(start.level, start.column), false);
  const lines = [...merged.keys()].sort((a, b) => a - b).map((place) => merged.get(place));
  for (const line of lines) {
    line.onPath = reached.has(line.reader);
    line.kind = line.onPath ? "path" : "open";
  }
  markMainEdges(lines, start, n, data);
  const headsShown = state.head < 0 ? nHeads : Number(state.head < nHeads);
  const total = nLayers * headsShown * panel.nPairs;
  return { lines, reached, count, total, column, focus };
}

// The edges that carry most to the node where the reading starts; see drawn_edges.py.
function markMainEdges(lines, start, n, data) {
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
