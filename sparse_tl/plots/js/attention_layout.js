// Layout of a circuit diagram, in pixels at full size: columns of tokens, which all panels share, and
// the rows of each panel. Layers of a deep model in which nothing is drawn are folded into a band.

// Width at which text of 11 px is 6 pt high in a column of 5.5 in.
const NARROWEST = 726;
const LEAST_COLUMN = 16, ROOMY_COLUMN = 48, WIDEST_COLUMN = 80, LONGEST_TURNED = 104;
const LEAST_ROW = 8, ROOMY_ROW = 25, HIGHEST_ROW = 45;
const CLEARANCE = 4; // lines that rise less per column would touch the next node
const WEB = 2; // lines per node
const LEGEND = 56; // two lines

// The panels that are shown, with their view and places; and the places that they share.
function layOut(data, state) {
  const alone = state.panel ?? -1;
  const panels = data.panels.map((panel, index) => ({ ...panel, index }));
  const shown = panels.filter(({ index }) => alone < 0 || index === alone);
  for (const panel of shown) {
    panel.view = selectEdges(panel, data, state);
    panel.folds = foldsOf(data, panel);
  }
  const hasArrow = data.transition && shown.length > 1, left = LEFT + (hasArrow ? ARROW_LEFT : 0);
  const columns = columnsOf(data, left), top = TOP + (data.title ? TITLE : 0);
  // Those of the first view: the figure grows where layers unfold.
  const rows = ((data.rows ??= {})[alone] ??= rowsOf(data, shown, columns, top));
  const placed = stacked(data, shown, columns, top, rows);
  const lineScale = Math.max(0.45, Math.min(1, columns.spacing / ROOMY_COLUMN, Math.max(...rows) / ROOMY_ROW));
  const layout = { ...columns, left, styles: lineStyles(data.colours.lines, lineScale) };
  return { panels: shown.map((panel, i) => ({ ...panel, ...placed[i] })), layout };
}

// ---- columns -----------------------------------------------------------------------------------

// `x` of each column; the size of tokens, and the width beyond which they are clipped; whether they are
// turned by 45 degrees; `bow`, the horizontal distance from the residual line of the control points of
// an edge from a column to itself; `hook`, the distance from a token's middle to the tip of an arrow
// round its side, or null if columns are too narrow.
function columnsOf({ panels, mostUnfolded, size }, left) {
  const [, , n] = panels[0].shape, most = Math.max(...panels.map(({ shape: [nLayers] }) => nLayers));
  const name = most > mostUnfolded ? `Layers ${most}\u2013${most}` : `Layer ${most - 1}`;
  const first = left + 42 + Math.ceil(textWidth(name, 12));
  const texts = panels.flatMap(({ input, output }) => [...input, ...output]);
  const widest = Math.max(...texts.map((text) => textWidth(text, 1)));
  const narrowest = size?.[0] ?? NARROWEST, nGaps = Math.max(n - 1, 1);
  let room = narrowest - LEFT - 34 - first;
  const widthIn = () => Math.min(WIDEST_COLUMN, Math.floor(room / nGaps));
  const fitting = [15, 13, 12, 11].find((px) => widest * px <= widthIn() - 6);
  const turned = !fitting && widthIn() < 64, tokenSize = fitting ?? (turned ? 11 : 12);
  if (turned) room -= 40; // the last token extends to the right
  const spacing = Math.max(widthIn(), LEAST_COLUMN);
  const width = Math.max(narrowest, narrowest + nGaps * spacing - room);
  const start = first + Math.floor(Math.max(0, room - nGaps * spacing) / 2);
  const tokenWidth = turned ? LONGEST_TURNED : spacing - 6;
  const longest = Math.min(tokenWidth, widest * tokenSize);
  return {
    x: Array.from({ length: n }, (_, column) => start + column * spacing), spacing, width,
    right: width - LEFT, tokenSize, tokenWidth, turned,
    tokenHeight: turned ? Math.ceil(longest * 0.65) + 6 : 0,
    bow: Math.max(8, Math.min(20, Math.round(0.45 * spacing))),
    hook: turned || spacing < longest + 28 ? null : longest / 2 + 5,
  };
}

// ---- rows --------------------------------------------------------------------------------------

// First and last layer of each run of layers without a line or an open MLP.
function foldsOf({ mostUnfolded }, { shape: [nLayers], view, mlps, removed = [], unfolded = [] }) {
  const folds = [], lines = [...view.lines, ...removed];
  const used = new Set([...lines.map(({ layer }) => layer), ...mlps.map(([layer]) => layer), ...unfolded]);
  for (let first = 0, last; first < nLayers && nLayers > mostUnfolded; first = last + 1) {
    last = first;
    if (used.has(first)) continue;
    while (last + 1 < nLayers && !used.has(last + 1)) last++;
    if (last > first) folds.push([first, last]);
  }
  return folds;
}

// The height of a layer, and of a fold, of each panel: what is roomy or, of a given size, what fits.
function rowsOf(data, shown, columns, top) {
  const counts = shown.map(({ shape: [nLayers], folds }) =>
    folds.reduce((n, [first, last]) => n - (last - first), nLayers));
  if (!data.size) {
    return counts.map((n) => Math.min(HIGHEST_ROW, Math.max(ROOMY_ROW, 5 * Math.floor(340 / n / 5))));
  }
  // A web of lines cannot be followed at any height: the other panels get the room.
  const webs = shown.map(({ view, shape: [nLayers, , n] }) => view.lines.length > WEB * nLayers * n);
  const followed = webs.map((isWeb) => !isWeb || webs.every((each) => each));
  const lowest = stacked(data, shown, columns, top, shown.map(() => LEAST_ROW)).at(-1);
  const height = (data.size[1] * shown.length) / data.panels.length - LEGEND;
  const room = Math.max(0, height - lowest.top - lowest.height);
  const more = Math.floor(room / counts.reduce((sum, n, i) => sum + (followed[i] ? n : 0), 0));
  return followed.map((isFollowed) => Math.min(HIGHEST_ROW, LEAST_ROW + (isFollowed ? more : 0)));
}

// The frames and contents of panels, one below the other.
function stacked(data, shown, columns, top, rows) {
  return shown.map((panel, i) => {
    const placed = placeRows(data, panel, columns, top, rows[i]);
    top += placed.height + GAP;
    return placed;
  });
}

// `levels` are the y coordinates of nodes, the input first; `outputY` and `inputY` those of tokens. An
// edge that spans more columns than `reach` curves round nodes: `bend` is the vertical extent of the
// bend of the edge from a column to itself, and `swing` of each bend of other edges.
function placeRows({ targets, mostUnfolded }, { shape: [nLayers], folds }, columns, top, row) {
  const { turned, tokenHeight } = columns;
  // An arrow from one token to the next arches over the output row.
  const hasArch = !turned && targets.some(([column, readAt]) => column !== readAt);
  const outputY = top + (turned ? 52 + tokenHeight : hasArch ? 88 : 68);
  const hidden = (level) => folds.some(([first, last]) => first < level && level <= last);
  const levels = Array(nLayers + 1).fill(outputY + 30);
  for (let level = nLayers - 1; level >= 0; level--) {
    levels[level] = levels[level + 1] + (hidden(level + 1) ? 0 : row);
  }
  const radius = Math.min(columns.spacing >= 24 ? 4 : 3, row / 5);
  const inputY = levels[0] + (turned ? 15 : 26);
  return {
    top, height: inputY + (turned ? tokenHeight + 8 : 14) - top, row, levels, hidden, inputY, outputY,
    reach: Math.floor(row / (radius + CLEARANCE)),
    bend: Math.round(0.3 * row), swing: Math.round(0.5 * row),
    // Nodes at which no line ends are small in deep models.
    radii: [radius / (nLayers > mostUnfolded ? 2 : 1), radius],
  };
}

// ---- styles of lines ---------------------------------------------------------------------------

const KINDS = ["open", "path", "main"], N_GRADES = 10;
// Widths of the weakest and the strongest line.
const WIDTHS = { main: [1.3, 4.2], path: [0.7, 2], open: [0.7, 1.6] };

// Kind, colour, width and dashes of all lines, in drawing order: light kinds first, within a kind weak
// grades first, each in blue and in orange. Stronger lines are darker and thicker; at a smaller scale,
// dark ones shrink less.
function lineStyles(colours, scale) {
  return KINDS.flatMap((kind) => Array.from({ length: N_GRADES }, (_, grade) => {
    const share = (grade + 0.5) / N_GRADES, [thin, thick] = WIDTHS[kind];
    const width = (thin + (thick - thin) * share) * (kind === "main" ? Math.max(scale, 0.6) : scale);
    // Most attention weights are small: an exponent below 1 separates them.
    return colours[kind].map(([weakest, strongest]) =>
      [kind, blend(weakest, strongest, share ** 0.6), Math.round(100 * width) / 100, dotsOf(width)]);
  }).flat());
}

// Dashes of a dotted line with round ends.
const dotsOf = (width) => `${width.toFixed(2)} ${(2.5 * width + 1).toFixed(2)}`;
