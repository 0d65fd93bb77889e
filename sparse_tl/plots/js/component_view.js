// Chooses the nodes and links that a view of the circuits shows.
//
// 1. Edges enter path by path (circuits/paths.py), as many as the view asks for (or as connect as many
//    nodes), and the path through every pinned node. Lines on no path among these are left out, unless the view shows them.
// 2. Supernodes replace their members; lines inside one are not drawn.
// 3. Lines with the same ends are merged into a link, unless the view separates q, k and v. The
//    strength of a link is its sum of |score|, relative to the strongest link of the panel; the sign
//    of its summed score, times that of the panel, says whether it helps.
//
// A line is a `Link` of circuits/paths.py: [source, reader, slot, edge], or [..., -1, weight] for a
// crossing from a head's keys to its queries. An edge whose head reads at several positions has a line
// for each; a link counts it once.

const CROSSING = "attention", MERGED = "several";

// The lines that are on a path of chosen lines from the input to the logits.
function connectedLines({ lines }, chosen, [inputs, logits]) {
  const links = chosen.map((i) => ({ source: lines[i][0], reader: lines[i][1] }));
  const above = reach(links, inputs, true), below = reach(links, logits, false);
  return new Set(chosen.filter((i) => above.has(lines[i][0]) && below.has(lines[i][1])));
}

// The lines of the most influential path through a line.
function pathThrough(panel, line) {
  const found = [line];
  for (let i = line; (i = panel.into[panel.lines[i][0]]) !== undefined;) found.push(i);
  for (let i = line; (i = panel.out[panel.lines[i][1]]) !== undefined;) found.push(i);
  return found;
}

// The number of edges that enter: whole paths until there are as many edges as the view asks for, or,
// in a panel that counts nodes, before they connect more nodes than that.
function numberOfEdges(panel, view) {
  const [order, sizes] = panel.order[view.by];
  if (!panel.countsNodes) return sizes.find((size) => size >= view.edges) ?? order.length;
  const ends = new Map(panel.lines.map(([source, reader, , edge]) => [edge, [source, reader]]));
  const connected = new Set();
  let n = 0;
  for (const size of sizes) {
    for (const edge of order.slice(n, size)) ends.get(edge).forEach((node) => connected.add(node));
    if (n && connected.size > view.edges) break;
    n = size;
  }
  return n;
}

function shownLines(panel, view, place, ends) {
  const edges = new Set(panel.order[view.by][0].slice(0, numberOfEdges(panel, view)));
  for (const pin of view.pins) {
    for (const lines of [panel.into, panel.out]) {
      const line = lines[place.get(pin)];
      if (line === undefined) continue;
      for (const i of pathThrough(panel, line)) edges.add(panel.lines[i][3]);
    }
  }
  const { lines } = panel;
  const chosen = [...lines.keys()].filter((i) => edges.has(lines[i][3]) || lines[i][3] < 0);
  const onPath = connectedLines(panel, chosen, ends);
  if (!view.off_path) return [chosen.filter((i) => onPath.has(i)), onPath];
  const real = chosen.filter((i) => lines[i][3] >= 0);
  const read = new Set(real.map((i) => lines[i][1])), written = new Set(real.map((i) => lines[i][0]));
  const kept = (i) => lines[i][3] >= 0 || (read.has(lines[i][0]) && written.has(lines[i][1]));
  return [chosen.filter(kept), onPath];
}

// All nodes, including supernodes, and the index of the node that represents each plain one.
function nodesOf(data, view, place) {
  const nodes = data.nodes.map(([name, kind, step, position, layer]) =>
    ({ name, kind, step, position, layer, size: 1, members: null }));
  const at = nodes.map((_, i) => i), groups = Object.entries(view.groups);
  groups.forEach(([name, members], g) => {
    const inside = members.map((member) => place.get(member)).filter((i) => i !== undefined);
    if (!inside.length) return;
    inside.sort((a, b) => a - b);
    const middle = nodes[inside[Math.floor((inside.length - 1) / 2)]];
    const step = middle.step + (g + 1) / (groups.length + 1);
    for (const i of inside) at[i] = nodes.length;
    const { position } = middle, size = inside.length;
    nodes.push({ name, kind: "group", step, position, layer: null, size, members: inside });
  });
  return [nodes, at];
}

const weightOf = (panel, line) => line[4] ?? (panel.scores ? Math.abs(panel.scores[line[3]]) : 1);

const byEnds = (a, b) => a.source - b.source || a.reader - b.reader || (a.apart < b.apart ? -1 : 1);

function linksOf(panel, view, nodes, at, place, ends) {
  const [shown, onPath] = shownLines(panel, view, place, ends), merged = new Map();
  for (const i of shown) {
    const [a, b, slot] = panel.lines[i], source = at[a], reader = at[b];
    if (source === reader) continue;
    const apart = view.slots && nodes[reader].kind !== "group" ? slot : "";
    const key = `${source}>${reader}>${apart}`;
    let link = merged.get(key);
    if (!link) {
      const port = apart === "q" || apart === "k" || apart === "v" ? apart : "";
      const within = [{ circuit: panel, lines: [], edges: new Set() }];
      merged.set(key, link = { key, source, reader, apart, port, within, only: null, size: 0 });
    }
    const [{ lines, edges }] = link.within, edge = panel.lines[i][3];
    lines.push(i);
    if (!edges.has(edge)) link.size += weightOf(panel, panel.lines[i]);
    if (edge >= 0) edges.add(edge);
  }
  const links = [...merged.values()].sort(byEnds);
  let largest = 0;
  for (const link of links) {
    const [{ lines, edges }] = link.within, slots = new Set(lines.map((i) => panel.lines[i][2]));
    link.slot = slots.size === 1 ? [...slots][0] : MERGED;
    link.score = panel.scores ? [...edges].reduce((sum, edge) => sum + panel.scores[edge], 0) : 0;
    link.good = panel.sign * link.score;
    link.onPath = lines.some((i) => onPath.has(i));
    link.influence = lines.reduce((sum, i) => sum + panel.influence[i], 0);
    if (edges.size) largest = Math.max(largest, link.size);
  }
  for (const link of links) link.strength = largest ? Math.min(1, link.size / largest) : 0;
  const edges = new Set(shown.map((i) => panel.lines[i][3]).filter((edge) => edge >= 0));
  return { ...panel, circuits: [panel], links, nEdges: edges.size };
}

function differenceOf([first, second]) {
  const [one, two] = [first, second].map(({ links }) => new Map(links.map((k) => [k.key, k])));
  const links = [...new Map([...one, ...two]).keys()].map((key) => {
    const [a, b] = [one.get(key), two.get(key)];
    const stronger = !a || (b && b.strength > a.strength) ? b : a;
    const only = a && b ? null : a ? 0 : 1;
    const within = [...(a?.within ?? []), ...(b?.within ?? [])];
    return { ...stronger, only, within, onPath: Boolean(a?.onPath || b?.onPath) };
  });
  links.sort(byEnds);
  const circuits = [...first.circuits, ...second.circuits];
  return { ...first, name: `${first.name} and ${second.name}`, circuits, links, nEdges: links.length };
}

// Supernodes: all nodes in each band of layers, or nodes of one layer with the same readers.
function groupsOf(data, drawn, how) {
  const byReaders = how === "readers", size = Number(how);
  const inner = drawn.nodes.filter(({ layer, index }) =>
    layer !== null && (!byReaders || drawn.layout.boxes.has(index)));
  const found = Map.groupBy(inner, ({ layer, index, position }) => {
    const here = position === null ? "" : ` @${data.columns[position]}`, low = size * Math.floor(layer / size);
    if (!byReaders) return `Layers ${low}\u2013${low + size - 1}${here}`;
    const readers = new Set(drawn.panels.flatMap(({ links }) =>
      links.filter((k) => k.source === index).map((k) => drawn.nodes[k.reader].name)));
    const names = [...readers].sort(), more = names.length > 2 ? ", \u2026" : "";
    return `L${layer} \u2192 ${names.slice(0, 2).join(", ")}${more}${here}\n${names.join(" ")}`;
  });
  const named = {};
  for (const [key, members] of found) {
    if (members.length < 2) continue;
    let name = key.split("\n")[0];
    while (name in named) name += "'";
    named[name] = members.map((node) => node.name);
  }
  return named;
}
