// Chooses the attention edges of a circuit diagram, finds those that lead to the prediction, and
// computes their lines. attention_text.js has the texts.
//
// 1. Weights are in thousandths (attention_diagram.py), and rounded to integers for drawing.
// 2. The heads of a layer are merged: an edge from key to query has the largest weight of any head.
// 3. Edges at or above the threshold are kept. Those that kept edges connect to the predicted token
//    are on the path; the others are merely open.
// 4. Of the edges on the path, the main ones carry most to the prediction; others are lighter. An edge
//    carries its share of the residual stream at its end, times the shares along the best route from
//    there to the prediction (1 for each step up the residual stream). Its share is what it writes
//    (AttentionGraph.carried), whatever its attention: an edge from a sink writes almost nothing. If that
//    is unknown, the share is the attention. If effects on the prediction are shown, an edge carries
//    its effect, which includes all routes. In a sparse model, usually every edge on the path is a
//    main edge; in a dense model, the main edges stand out.

const MOST_MAIN_EDGES = 32;

const nodeName = (level, column) => `${level},${column}`;

// The edges of a list of weights, which holds the steps between their flat indices in [layer, head,
// query, key]; unpacked on first use.
function edgesOf({ shape: [, nHeads, n] }, list) {
  let index = 0;
  list.edges ??= list.steps.map((step, i) => {
    index += step;
    const row = Math.floor(index / n);
    const heads = Math.floor(row / n);
    const [layer, query, key] = [Math.floor(heads / nHeads), row % n, index % n];
    const [source, reader] = [nodeName(layer, key), nodeName(layer + 1, query)];
    const unrounded = list.values[i];
    const value = Math.sign(unrounded) * Math.round(Math.abs(unrounded));
    const estimated = list.exact?.[i] === 0;
    const ends = { layer, head: heads % nHeads, query, key, source, reader };
    return { ...ends, index, unrounded, value, estimated };
  });
  return list.edges;
}

// An edge in a list, unless its weight was too small to be sent.
function edgeAt(panel, list, index) {
  list.byIndex ??= new Map(edgesOf(panel, list).map((edge) => [edge.index, edge]));
  return list.byIndex.get(index);
}

// The steps up the residual stream, whose share is 1.
function residualSteps({ shape: [nLayers, , n] }) {
  return Array.from({ length: nLayers * n }, (_, i) => {
    const [layer, column] = [Math.floor(i / n), i % n];
    return { layer, share: 1, source: nodeName(layer, column), reader: nodeName(layer + 1, column) };
  });
}

// First-order estimates replace missing effects.
function shownWeight(panel, state) {
  return state.weight === "effect" && !panel.weights.effect ? "first-order" : state.weight;
}

// Effects have a sign; attention and carried shares do not.
function isSigned(kind) {
  return kind === "effect" || kind === "first-order";
}

function weightsOf(panel, kind, target) {
  return panel.weights[kind]?.rows[isSigned(kind) ? target : 0];
}

// The share that an edge carries to its end, 0 to 1, or its effect on the prediction.
function shareOf(panel, kind, edge, data) {
  if (isSigned(kind)) return Math.abs(edge.value) / data.steps;
  const { rows: [list], scales: [scale] } = panel.weights.carried ?? panel.weights.attention;
  return ((edgeAt(panel, list, edge.index)?.value ?? 0) / data.steps) * scale;
}

// The content of a panel in the current state. Reachability is over all heads, even if a single head
// is shown.
function selectEdges(panel, data, state) {
  const [nLayers, , n] = panel.shape;
  const kind = shownWeight(panel, state);
  const weights = weightsOf(panel, kind, state.target);
  const residual = residualSteps(panel);
  const kept = [...residual];
  const merged = new Map();
  let [count, sum] = [0, 0];
  for (const edge of edgesOf(panel, weights)) {
    const { layer, head, query, key, value, index, estimated } = edge;
    if (Math.abs(value) < state.limit) continue;
    kept.push(edge);
    if (state.head >= 0 && head !== state.head) continue;
    count++;
    sum += value;
    const lineIndex = (layer * n + query) * n + key;
    const line = merged.get(lineIndex);
    const share = shareOf(panel, kind, edge, data);
    if (!line) {
      merged.set(lineIndex, { ...edge, share, others: [] });
      continue;
    }
    line.share = Math.max(line.share, share);
    if (Math.abs(line.value) >= Math.abs(value)) line.others.push(head);
    else {
      line.others.push(line.head);
      Object.assign(line, { head, value, index, estimated });
    }
  }
  const [column, readAt] = data.targets[state.target];
  const focus = state.focus?.panel === panel.index ? state.focus : null;
  const start = focus ? nodeName(focus.level, focus.column) : nodeName(nLayers, readAt);
  const reached = reach(kept, [start], false);
  const lines = [...merged.keys()].sort((a, b) => a - b).map((line) => merged.get(line));
  for (const line of lines) {
    line.estimated ||= kind === "first-order";
    line.onPath = reached.has(line.reader);
    line.kind = line.onPath ? "path" : "open";
  }
  if (!isSigned(kind)) followRoutes(lines, residual, start);
  markMainEdges(lines);
  const shown = (_, head) => state.head < 0 || head === state.head;
  const all = (layers) => layers.flatMap((heads) => heads.filter(shown)).reduce((a, b) => a + b, 0);
  const [open, total] = [all(panel.nOpen), all(panel.nPossible)];
  return { lines, reached, count, sum, open, total, column, focus };
}

// Turns the share of each line at its end into its share at the start node, by the best route.
function followRoutes(lines, residual, start) {
  const strength = new Map([[start, 1]]);
  for (const line of [...lines, ...residual].sort((a, b) => b.layer - a.layer)) {
    line.share *= strength.get(line.reader) ?? 0;
    strength.set(line.source, Math.max(strength.get(line.source) ?? 0, line.share));
  }
}

// Marks the edges that carry most, if they carry anything.
function markMainEdges(lines) {
  const carrying = lines.filter((line) => line.onPath && line.share > 0);
  // The sort is stable: ties keep the order of layer, query and key.
  carrying.sort((a, b) => b.share - a.share);
  for (const line of carrying.slice(0, MOST_MAIN_EDGES)) line.kind = "main";
}

// ---- lines -------------------------------------------------------------------------------------

// A straight line; a curve if that would touch nodes; or an arc beside the residual line if an edge
// stays in its column.
function edgePath(panel, { x, bow }, { layer, query, key }) {
  const [startX, startY] = [x[key], panel.levels[layer]];
  const [endX, endY] = [x[query], panel.levels[layer + 1]];
  if (Math.abs(query - key) > panel.reach) {
    return `M${startX} ${startY}C${startX} ${startY - panel.swing} ` +
      `${endX} ${endY + panel.swing} ${endX} ${endY}`;
  }
  if (query !== key) return `M${startX} ${startY}L${endX} ${endY}`;
  const side = startX + bow;
  return `M${startX} ${startY}C${side} ${startY - panel.bend} ` +
    `${side} ${endY + panel.bend} ${endX} ${endY}`;
}

// The attributes of one path for all lines of a style, which keeps files of thousands of lines small.
// Styles are in drawing order: kinds, then grades, then signs. Estimates have a separate dotted path
// per style, below the other lines.
function linePaths(panel, layout, steps) {
  const paths = layout.styles.flatMap(([kind, stroke, width, dots]) => {
    const path = { "data-kind": kind, d: "", stroke, "stroke-width": width };
    return [{ ...path, "data-estimate": "", "stroke-dasharray": dots }, path];
  });
  for (const line of panel.view.lines) {
    const grade = Math.floor(((Math.abs(line.value) - 1) * N_GRADES) / steps);
    const kind = KINDS.indexOf(line.kind);
    line.style = 2 * (kind * N_GRADES + grade) + (line.value < 0);
    line.d = edgePath(panel, layout, line);
    paths[2 * line.style + !line.estimated].d += line.d;
  }
  return paths.filter(({ d }) => d);
}

// The residual stream below the nodes that lead to the prediction.
function residualPath({ shape: [nLayers, , n], levels, view }, { x }) {
  let d = "";
  for (let level = 1; level <= nLayers; level++) {
    for (let column = 0; column < n; column++) {
      if (!view.reached.has(nodeName(level, column))) continue;
      d += `M${x[column]} ${levels[level - 1]}V${levels[level]}`;
    }
  }
  return d;
}

// The nodes at which a line starts or ends; others are small in deep models.
function lineEnds({ lines }) {
  return new Set(lines.flatMap(({ source, reader }) => [source, reader]));
}

// The numbers of edges in a panel, as attributes of its group.
function countsOf({ lines, count }) {
  return {
    "data-edges-shown": lines.length,
    "data-edges-on-path": lines.filter((line) => line.onPath).length,
    "data-attention-edges": count,
  };
}
