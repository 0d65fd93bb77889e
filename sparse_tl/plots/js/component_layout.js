// Layout of one view of a component diagram: all coordinates of a panel, in pixels.
//
// 1. Rows, upwards: the input; each layer's heads with its MLP beside them, or above them if the MLP
//    reads from one of these heads; the logits. A layer without nodes has no row; nodes that do not
//    fit side by side take several rows. With positions, every position has a column.
// 2. Trunks: a node with readers further up has one trunk, with a bend in every row that it passes, and
//    links branch off below their readers. At most one line per node below passes a row, instead of
//    all links: 2,000 links need 150 bends per row, not 1,000.
// 3. Order and position nodes and bends (layered_layout.js), separately in each column.
//
// The layout is as wide as the figure, so text is never scaled down. The vertex of a node is its index;
// bends of its trunk have larger numbers.
//
// Libraries were tried on 2,000 circuit edges of GPT-2 small's shape: dagre 3.1 takes 13 s for a
// picture 38,500 pixels wide, ELK 0.12 (1.6 MB of script) 21 s and 18,900 pixels; d3-dag 1.2 takes
// 4.5 s for 500 edges. All three route every edge separately, so that at the width of a page text
// would be smaller than a pixel. None bundles the edges of a source.

const NODE_HEIGHT = 19, HALF = 9.5, NODE_TEXT = 11.5, MOST_LABEL = 150, END_ROOM = 5;
const SHARE_OF_NODES = 0.72, SPREAD = 7, WIDEST_HEADING = 60, MOST_WIDENED = 1.15;
const SPACINGS = [1, 0.8, 0.6, 0.45, 0.3, 0.2, 0.1, 0.05, 0];

function nodeText(node, labels) {
  const plain = node.position === null || node.kind === "group";
  const name = labels[node.name] || (plain ? node.name : node.name.split("@")[0]);
  const shown = node.kind === "keys" ? name.replace("<kv>", " kv") : name;
  const text = shown.slice(0, 200) + (node.kind === "group" ? ` (${node.size})` : "");
  return clipText(text, NODE_TEXT, MOST_LABEL);
}

const portOffset = (width, slot) => ({ q: -0.3, v: 0.3 }[slot] ?? 0) * width;

// links: {source, reader, port} by index; the ordered union over all panels.
function layOut(nodes, links, labels, bounds, headings) {
  const nColumns = headings.length || 1;
  let used = [...new Set(links.flatMap(({ source, reader }) => [source, reader]))];
  used.sort((a, b) => a - b);
  if (!used.length) {
    used = nodes.flatMap(({ kind }, i) => (kind === "input" || kind === "logits" ? [i] : []));
  }
  const widths = nodeWidths(nodes, used, links, labels, bounds[1] - bounds[0]);
  const column = new Map(used.map((i) => [i, nColumns > 1 ? nodes[i].position ?? 0 : 0]));
  const columns = columnEnds(used, column, widths, bounds, headings);
  const level = levels(nodes, used, links);
  const rows = nodeRows(used, level, column, widths, columns);
  const nRows = Math.max(0, ...rows.values()) + 1;
  const upwards = links.map(({ source, reader, port }) =>
    rows.get(source) <= rows.get(reader) ? [source, reader, port] : [reader, source, port]);
  const top = new Map(used.map((i) => [i, rows.get(i)]));
  for (const [a, b] of upwards) top.set(a, Math.max(top.get(a), rows.get(b) - 1));
  const x = [], bendAt = (i, row) => i + nodes.length * (row + 1);
  let spacing = 1;
  columns.forEach(([left, right], c) => {
    const inside = used.filter((i) => column.get(i) === c);
    const { segments, net } = network(inside, rows, top, upwards, column, widths, nRows, bendAt);
    const order = orderRows(net, segments);
    const half = (vertex) => (widths.get(vertex) ?? 0) / 2 + END_ROOM;
    const ends = order.map((row) => (row.length ? [left + half(row[0]), right - half(row[row.length - 1])] : []));
    const [share, separations] = roomiest(order, widths, ends);
    spacing = Math.min(spacing, share);
    const placed = placeRows(order, segments, separations, ends);
    placed.forEach((at, vertex) => { x[vertex] = at; });
  });
  const heights = rowHeights(used, level, rows, nRows);
  const boxes = new Map(used.map((i) => [
    i, { x: x[i], y: heights[rows.get(i)], width: widths.get(i) },
  ]));
  const bend = (i, row) => x[bendAt(i, row)];
  const height = heights[0] + HALF + 12;
  const layout = { height, boxes, rows, top, bend, heights, columns, spacing };
  return { ...layout, bands: bands(nodes, used, rows, heights), routes: route(layout, links) };
}

function nodeWidths(nodes, used, links, labels, room) {
  const number = new Map();
  for (const { source, reader } of links) {
    for (const end of [source, reader]) number.set(end, (number.get(end) ?? 0) + 1);
  }
  return new Map(used.map((i) => {
    const { kind, position } = nodes[i];
    const text = Math.ceil(textWidth(nodeText(nodes[i], labels), NODE_TEXT)) + 8;
    const plain = (kind === "input" || kind === "logits") && position === null;
    return [i, plain ? Math.max(text, Math.min(0.5 * room, 6 * (number.get(i) ?? 0) + 12)) : text];
  }));
}

// Every column has room for its nodes with the trunks beside them and, as far as that fits or makes the
// figure little wider, for its heading.
function columnEnds(used, column, widths, [left, right], headings) {
  const nColumns = headings.length || 1, [total, widest, count] = [0, 0, 0].map((n) => Array(nColumns).fill(n));
  for (const i of used) {
    const c = column.get(i), width = widths.get(i);
    total[c] += width;
    widest[c] = Math.max(widest[c], width);
    count[c] += 1;
  }
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  let least = widest.map((width, c) => width + 26 + Math.min(3 * Math.max(0, count[c] - 3), 60));
  const wider = headings.map((text, c) =>
    Math.max(least[c], Math.min(1.1 * textWidth(text, 12) + 8, WIDEST_HEADING)));
  const most = Math.max(right - left, MOST_WIDENED * sum(least));
  const share = Math.min(1, (most - sum(least)) / (sum(wider) - sum(least) || 1));
  if (headings.length) least = least.map((width, c) => width + share * (wider[c] - width));
  const spare = Math.max(0, right - left - sum(least)), shares = total.map(Math.sqrt);
  const whole = sum(shares) || 1;
  let end = left;
  return least.map((need, c) => [end, (end += need + (spare * shares[c]) / whole)]);
}

function levels(nodes, used, links) {
  const raised = new Set();
  for (const { source, reader } of links) {
    const mlp = nodes[reader];
    if (mlp.kind === "mlp" && nodes[source].step === mlp.step - 1) raised.add(reader);
  }
  return new Map(used.map((i) => [
    i, nodes[i].step - (nodes[i].kind === "mlp" && !raised.has(i) ? 1 : 0),
  ]));
}

function nodeRows(used, level, column, widths, columns) {
  const rows = new Map();
  let first = 0;
  for (const step of [...new Set(level.values())].sort((a, b) => a - b)) {
    const inLevel = used.filter((i) => level.get(i) === step);
    let nRows = 1;
    columns.forEach(([left, right], c) => {
      let row = 0, taken = 0;
      for (const i of inLevel) {
        if (column.get(i) !== c) continue;
        if (taken && taken + widths.get(i) + 8 > SHARE_OF_NODES * (right - left)) {
          [row, taken] = [row + 1, 0];
        }
        rows.set(i, first + row);
        taken += widths.get(i) + 8;
      }
      nRows = Math.max(nRows, row + 1);
    });
    first += nRows;
  }
  return rows;
}

function rowHeights(used, level, rows, nRows) {
  const at = new Map(used.map((i) => [rows.get(i), level.get(i)]));
  const pitch = Math.min(62, Math.max(40, Math.floor(900 / nRows)));
  const heights = [10 + HALF];
  for (let row = nRows - 1; row > 0; row--) {
    heights.push(heights[heights.length - 1] + (at.get(row) === at.get(row - 1) ? 34 : pitch));
  }
  return heights.reverse();
}

function bands(nodes, used, rows, heights) {
  const spans = new Map();
  for (const i of used) {
    const { layer } = nodes[i];
    if (layer === null) continue;
    const y = heights[rows.get(i)], [low, high] = spans.get(layer) ?? [y, y];
    spans.set(layer, [Math.min(low, y), Math.max(high, y)]);
  }
  const reach = HALF + 6, found = [...spans].sort((a, b) => a[0] - b[0]);
  return found.map(([layer, [low, high]]) => [`Layer ${layer}`, low - reach, high + reach]);
}

function network(inside, rows, top, upwards, column, widths, nRows, bendAt) {
  const net = Array.from({ length: nRows }, () => []), number = new Map(), size = new Map();
  for (const i of inside) size.set(rows.get(i), (size.get(rows.get(i)) ?? 0) + 1);
  const segments = [], members = new Set(inside);
  for (const i of inside) {
    const start = rows.get(i), before = number.get(start) ?? 0;
    const at = (before + 0.5) / size.get(start);
    number.set(start, before + 1);
    net[start].push([at, i]);
    for (let row = start + 1; row <= top.get(i); row++) {
      net[row].push([at, bendAt(i, row)]);
      const first = row === start + 1, lower = first ? i : bendAt(i, row - 1);
      segments.push({ lower, upper: bendAt(i, row), weight: first ? 2 : 8, port: 0 });
    }
  }
  for (const [a, b, slot] of upwards) {
    if (column.get(a) !== column.get(b) || !members.has(a)) continue;
    const below = rows.get(b) - 1, lower = below === rows.get(a) ? a : bendAt(a, below);
    const port = portOffset(widths.get(b), slot);
    segments.push({ lower, upper: b, weight: 1, port });
  }
  return { segments, net: net.map((row) => row.sort((a, b) => a[0] - b[0]).map((v) => v[1])) };
}

function roomiest(order, widths, ends) {
  let separations, share;
  for (share of SPACINGS) {
    const f = share, gaps = [9 * f, 2 + 7 * f, 4 + 22 * f];
    let fits = true;
    separations = order.map((row, r) => {
      const halves = row.map((v) => (widths.get(v) ?? 0) / 2);
      const found = [];
      for (let i = 1; i < halves.length; i++) {
        const [a, b] = [halves[i - 1], halves[i]];
        found.push(a + b + gaps[(a > 0) + (b > 0)]);
      }
      fits &&= found.reduce((p, q) => p + q, 0) <= Math.max(0, ends[r][1] - ends[r][0] || 0);
      return found;
    });
    if (fits) break;
  }
  return [share, separations];
}
