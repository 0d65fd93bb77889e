// Positions of the panels of a component diagram: side by side if all are then legible, otherwise
// one above the other. All have the same layout.

const HEADING = 54, LINE = 16, COLUMN_HEADING = 22, ARROW_ABOVE = 50;
// Least width of a panel beside others, and least spacing of its lines, in units of 9 px.
const [LEAST_PANEL, LEAST_SPACING] = [420, 0.3];

// A view: nodes, panels with their links and positions, and the layout that panels share.
function viewOf(data, view, width) {
  const place = new Map(data.nodes.map(([name], i) => [name, i]));
  const ends = ["input", "logits"].map((end) =>
    data.nodes.flatMap(([, kind], i) => (kind === end ? [i] : [])));
  const [nodes, at] = nodesOf(data, view, place);
  nodes.forEach((node, index) => { node.index = index; });
  let panels = data.panels.map((panel) => linksOf(panel, view, nodes, at, place, ends));
  if (view.difference) panels = [differenceOf(panels)];
  const union = [...new Map(panels.flatMap((panel) => panel.links.map((k) => [keyOf(k), k]))).values()];
  union.sort(byEnds);
  const label = Math.max(0, ...nodes.filter((node) => node.layer !== null)
    .map((node) => textWidth(`Layer ${node.layer}`, 12.5)));
  // The layout of a panel from x = left to x = right, and the right edge that its columns need.
  const between = (left, right) => {
    const bounds = [left + 14 + label, right - 8];
    const layout = layOut(nodes, union, view.labels, bounds, data.columns);
    return { left, right: Math.round(layout.columns[layout.columns.length - 1][1] + 8), layout };
  };
  const n = panels.length, moved = data.transition && n > 1, share = (width - 2 * LEFT + GAP) / n - GAP;
  let placed = n > 1 && share >= LEAST_PANEL ? between(LEFT, Math.floor(LEFT + share)) : null;
  const beside = placed && placed.layout.spacing >= LEAST_SPACING && placed.right <= LEFT + share;
  if (!beside) placed = between(LEFT + (moved ? ARROW_LEFT : 0), width - LEFT);
  const { left, right, layout } = placed, room = right - left - 28;
  for (const panel of panels) panel.caption = wrapText(captionOf(data, view, panel), 12, room);
  const lines = Math.max(...panels.map(({ caption }) => caption.length));
  const above = HEADING + LINE * (lines - 1) + (data.columns.length ? COLUMN_HEADING : 0);
  const height = Math.round(above + layout.height);
  const top = TOP + (data.title ? TITLE : 0) + (beside && moved ? ARROW_ABOVE : 0);
  panels.forEach((panel, index) => Object.assign(panel, beside
    ? { index, top, shift: index * (right - left + GAP) }
    : { index, top: top + index * (height + GAP), shift: 0 }));
  const whole = right + panels[n - 1].shift + LEFT;
  return { nodes, at, place, panels, layout, left, right, above, height, beside, width: whole };
}

// An arrow from each panel to the next, and their common text.
function arrowsOf({ panels, height, left, right, beside, width }, { transition, colours: { ink } }) {
  if (!beside) return arrowsDown(panels.map(({ top }) => ({ top, height })), left, transition, ink);
  const { top } = panels[0], edge = top - 5;
  const arrows = panels.slice(1).flatMap((_, i) => {
    const [start, end] = [right - 70, left + 70 + GAP + right - left].map((x) => x + panels[i].shift);
    return arrowOf(
      `M${start} ${edge}C${start + 12} ${edge - 30} ${end - 18} ${edge - 30} ${end - 3} ${edge - 9}`,
      `M${end + 2} ${edge + 2}l-16 -6l8 -4l4 -8z`, 4, ink);
  });
  const place = { transform: `translate(${width / 2} ${top - 36})` };
  return [...arrows, arrowText(transition, 14, width - 2 * LEFT, place)];
}

// The shapes in another panel that are the same part of the same links as a shape of this panel.
function counterparts(panel, shape, other) {
  const keys = new Set(shape.links.map((k) => panel.links[k].key));
  const isPiece = ({ rows }) => (rows && shape.rows
    ? rows[0] < shape.rows[1] && shape.rows[0] < rows[1] : !rows && !shape.rows);
  return other.shapes.filter((one) => isPiece(one) && one.links.some((k) => keys.has(other.links[k].key)));
}
