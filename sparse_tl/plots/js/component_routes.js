// Links as curves: trunks that leave nodes, and branches off them.
//
// A curve leaves and enters rows vertically and turns between them, so it crosses no node. Links that
// leave or enter the same side of a box are spread over it in the order of their other ends. A line
// that leads downwards, possible with supernodes, has an arrowhead half-way.

const keyOf = ({ source, reader, port }) => `${source}>${reader}${port}`;

function route(layout, links) {
  const { boxes, rows, bend, heights } = layout;
  const starts = new Map(), ends = new Map(), leaving = new Map(), entering = new Map();
  const into = (map, key, empty) => map.get(key) ?? map.set(key, empty).get(key);
  const sides = ({ source: a, reader: b }) => (rows.get(a) < rows.get(b) ? [a, b] : [b, a]);
  function turn(link) {
    const [lower, upper] = sides(link), below = rows.get(upper) - 1;
    return below > rows.get(lower) ? below : null;
  }
  for (const link of links) {
    const [lower, upper] = sides(link), box = boxes.get(upper);
    const nexts = into(leaving, lower, new Map());
    if (turn(link) === null) nexts.set(keyOf(link), box.x + portOffset(box.width, link.port));
    else nexts.set("trunk", bend(lower, rows.get(lower) + 1));
    if (link.port) ends.set(keyOf(link), box.x + portOffset(box.width, link.port));
    else into(entering, upper, []).push(link);
  }
  function spread(keys, node, save) {
    const { x, width } = boxes.get(node);
    const step = Math.min(SPREAD, (width - 12) / Math.max(keys.length - 1, 1));
    keys.forEach((key, i) => save(key, x - (step * (keys.length - 1)) / 2 + step * i));
  }
  for (const [node, nexts] of leaving) {
    const keys = [...nexts.keys()].sort((a, b) => nexts.get(a) - nexts.get(b));
    spread(keys, node, (key, x) => starts.set(key === "trunk" ? `trunk ${node}` : key, x));
  }
  const last = (link) => {
    const [lower] = sides(link), row = turn(link);
    return row === null ? boxes.get(lower).x : bend(lower, row);
  };
  for (const [node, inside] of entering) {
    inside.sort((a, b) => last(a) - last(b));
    spread(inside, node, (link, x) => ends.set(keyOf(link), x));
  }
  const f = (value) => Math.round(10 * value) / 10;
  function piece(x0, y0, x1, y1) {
    const middle = f((y0 + y1) / 2);
    return `M${f(x0)} ${f(y0 - HALF)}C${f(x0)} ${middle} ${f(x1)} ${middle} ${f(x1)} ${f(y1 + HALF)}`;
  }
  function branch(link) {
    const [lower, upper] = sides(link), row = turn(link);
    const x = row === null ? starts.get(keyOf(link)) : bend(lower, row);
    const y = heights[row === null ? rows.get(lower) : row];
    const [x1, y1] = [ends.get(keyOf(link)), heights[rows.get(upper)]];
    return piece(x, y, x1, y1) + (upper === link.source ? arrowhead(x, y, x1, y1) : "");
  }
  // Half-way on a piece that leads downwards.
  function arrowhead(x0, y0, x1, y1) {
    const [dx, dy] = [2 * (x0 - x1), y0 - y1 - 2 * HALF], length = Math.hypot(dx, dy);
    const [along, across] = [6 * dx / length, 6 * dy / length];
    const [x, y] = [(x0 + x1 + along) / 2, (y0 + y1 + across) / 2];
    return `M${f(x - along - across / 2)} ${f(y - across + along / 2)}L${f(x)} ${f(y)}`
      + `L${f(x - along + across / 2)} ${f(y - across - along / 2)}`;
  }
  function trunk(node, from, to) {
    let path = "";
    for (let row = from; row < to; row++) {
      const x = row === rows.get(node) ? starts.get(`trunk ${node}`) : bend(node, row);
      path += piece(x, heights[row], bend(node, row + 1), heights[row + 1]);
      path += `V${f(heights[row + 1] - HALF)}`;
    }
    return path;
  }
  return { sides, turn, branch, trunk };
}

// The curves of a panel's links in drawing order: {d, links, stroke, strength}; trunks also have rows.
function shapesOf(layout, links, stroke, shared) {
  const { sides, turn, branch, trunk } = layout.routes, strokes = links.map(stroke), found = [];
  const branches = links.map((link, k) =>
    ({ d: branch(link), links: [k], stroke: strokes[k], strength: link.strength }));
  const turned = links.map((link, k) => [turn(link), k]).filter(([row]) => row !== null);
  const trunks = Map.groupBy(turned, ([, k]) => sides(links[k])[0]);
  for (const [node, turns] of [...trunks].sort((a, b) => a[0] - b[0])) {
    let start = layout.rows.get(node);
    for (const row of [...new Set(turns.map(([at]) => at))].sort((a, b) => a - b)) {
      const carried = turns.filter(([at]) => at >= row).map(([, k]) => k);
      const colours = new Set(carried.map((k) => strokes[k]));
      const colour = colours.size === 1 ? strokes[carried[0]] : shared;
      const strength = Math.max(...carried.map((k) => links[k].strength));
      const d = trunk(node, start, row), rows = [start, row];
      found.push({ d, links: carried, stroke: colour, strength, rows });
      start = row;
    }
  }
  const above = (shape) => Number(links[shape.links[0]].onPath);
  branches.sort((a, b) => above(a) - above(b) || a.strength - b.strength || b.links[0] - a.links[0]);
  return [...found, ...branches];
}
