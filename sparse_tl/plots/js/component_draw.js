// Draws a view of a component diagram as markup: in the browser, and in Python for static files.

const [THIN, THICK, WEAKEST, FAR_LINE] = [0.9, 4.6, 0.8, 0.1];

const lineWidth = (strength) => Math.round(100 * (THIN + (THICK - THIN) * Math.sqrt(strength))) / 100;

function fullColour(link, view, colours) {
  if (link.slot === CROSSING) return colours.slots[CROSSING];
  if (view.difference) return link.only === null ? colours.plain : colours.only[link.only];
  if (view.colour !== "sign") return colours.slots[link.slot];
  return link.good < 0 ? colours.hurts : link.good > 0 ? colours.helps : colours.plain;
}

function captionOf(data, view, panel) {
  const n = (value) => value.toLocaleString("en-US");
  const off = panel.links.filter((link) => !link.onPath).length;
  if (view.difference) {
    const count = (side) => n(panel.links.filter((link) => link.only === side).length);
    const [a, b] = data.panels.map(({ name }) => name.slice(0, 40));
    return `${count(0)} links only in ${a}, ${count(1)} only in ${b}, ${count(null)} in both`;
  }
  const held = panel.names.length;
  const of = held < panel.kept ? `the ${n(held)} strongest of ${n(panel.kept)}` : n(panel.kept);
  const by = view.by === "influence" ? "influence" : `|${data.words.value}|`;
  const whole = panel.existing === undefined ? "" : ` (model: ${n(panel.existing)})`;
  const paths = off ? `; ${n(off)} links on no path` : ", in whole paths from input to logits";
  const nodes = new Set(panel.links.flatMap(({ source, reader }) => [source, reader]));
  const remark = panel.remark ? `; ${panel.remark}` : "";
  const connected = panel.countsNodes ? `${n(nodes.size)} nodes with ` : "";
  return `${connected}${n(panel.nEdges)} of ${of} ${data.words.edges}, by ${by}${paths}${whole}${remark}`;
}

// The initial view, for static figures: its width, height and markup.
function firstView(data) {
  const drawn = viewOf(data, data.view, data.width);
  const chosen = { focus: null, selected: new Set(), found: new Set() };
  return [drawn.width, ...drawFigure(data, data.view, drawn, chosen)];
}

// The height and the markup of a figure.
function drawFigure(data, view, drawn, chosen) {
  const { panels, left, width } = drawn;
  const parts = panels.map((panel) => drawPanel(data, view, drawn, panel, chosen));
  if (data.transition && panels.length > 1) parts.push(...arrowsOf(drawn, data));
  const bottom = panels[panels.length - 1].top + drawn.height;
  const entries = legendOf(data, view, drawn).map(([colour, weight, words]) =>
    [lineSample(colour, weight), words]);
  const [legend, height] = legendMarkup(entries, left, width - LEFT, bottom, data.colours.muted);
  return [height, figureMarkup(width, height, data.title, [...parts, legend])];
}

function drawPanel(data, view, drawn, panel, chosen) {
  const { layout, left, right, above, height, nodes } = drawn, { colours } = data;
  const frame = frameOf({ left, right, top: panel.top, height }, panel.name, panel.caption, 12, colours);
  const grounds = layout.bands.flatMap(([label, top, bottom]) => [
    svgElement("rect", { x: left + 6, y: top, width: right - left - 12, height: bottom - top,
      rx: 4, fill: colours.band }),
    svgText({ x: left + 12, y: (top + bottom) / 2 + 4.5, "font-size": 12.5, fill: colours.muted }, label),
  ]);
  data.columns.forEach((text, c) => {
    const [start, end] = layout.columns[c];
    grounds.push(
      svgElement("path", { d: `M${end.toFixed(1)} -12V${layout.height - 6}`, stroke: colours.grid }),
      svgText({ x: (start + end) / 2, y: -4, "text-anchor": "middle", "font-size": 12,
        "font-weight": "bold" }, clipText(text, 12, end - start - 4)),
    );
  });
  const stroke = (link) => (link.onPath
    ? blend("#ffffff", fullColour(link, view, colours), WEAKEST + (1 - WEAKEST) * Math.sqrt(link.strength))
    : colours.open);
  panel.shapes = shapesOf(layout, panel.links, stroke, colours.shared);
  // A trunk has the colour of the links in it that are near, if they have one colour.
  panel.paint = (shape, near) => {
    const links = shape.links.map((k) => panel.links[k]).filter((link) => !near || near.links.has(link));
    const strokes = new Set(near ? links.map(stroke) : []);
    return {
      stroke: strokes.size === 1 ? [...strokes][0] : shape.stroke, opacity: links.length ? null : FAR_LINE,
    };
  };
  const near = nearOf(panel, chosen.focus, chosen.focus);
  const lines = panel.shapes.map((shape) => {
    const links = shape.links.map((k) => panel.links[k]), [{ source, reader }] = links;
    const { stroke, opacity } = panel.paint(shape, near);
    shape.onPath = links.some((link) => link.onPath) && opacity === null;
    return svgElement("path", {
      "data-link": links.length > 1 ? null : `${nodes[source].name}->${nodes[reader].name}`,
      d: shape.d,
      stroke, "stroke-width": lineWidth(shape.strength),
      "stroke-dasharray": links.every(({ slot }) => slot === CROSSING) ? "5 3" : null,
      opacity,
    });
  });
  panel.linksAt = new Map();
  for (const link of panel.links) {
    for (const end of [link.source, link.reader]) {
      (panel.linksAt.get(end) ?? panel.linksAt.set(end, []).get(end)).push(link);
    }
  }
  const boxes = [...layout.boxes].map(([i, box]) => drawNode(data, view, panel, nodes[i], box, chosen, near));
  const content = svgElement("g", { transform: `translate(0 ${panel.top + above})` }, ...grounds,
    svgElement("g", { "data-role": "links", fill: "none", "stroke-linecap": "round" }, ...lines),
    svgElement("g", { "data-role": "nodes", "font-size": 11.5, "text-anchor": "middle" }, ...boxes),
    ...marksOf(data, drawn));
  return svgElement("g", { "data-panel": panel.index, "data-edges-shown": panel.nEdges,
    transform: panel.shift ? `translate(${panel.shift} 0)` : null }, ...frame, content);
}

// The nodes and links on whole paths through a node, which is source and reader, or through the links
// from a source to readers.
function nearOf(panel, source, ...readers) {
  if (source === null) return null;
  const before = reach(panel.links, [source], false), after = reach(panel.links, readers, true);
  const links = panel.links.filter((link) => after.has(link.source) || before.has(link.reader)
    || (link.source === source && readers.includes(link.reader)));
  return { links: new Set(links), nodes: new Set([...after, ...before]) };
}

const nodeOpacity = (index, isFound, near) => (near && !near.nodes.has(index) && !isFound ? 0.3 : null);

const roleOf = (data, view, panel, { name }) =>
  data.panels[view.difference ? 0 : panel.index].roles?.[name.split("@")[0]];

function paintOf(data, view, panel, node) {
  const links = panel.linksAt.get(node.index) ?? [];
  const state = links.some((k) => k.onPath) ? "path" : links.length ? "open" : "absent";
  const sides = new Set(links.map((k) => k.only)), { colours } = data;
  const role = roleOf(data, view, panel, node);
  if (state === "absent") return [state, colours.absentNode];
  if (view.difference && sides.size === 1 && !sides.has(null)) return [state, colours.sides[[...sides][0]]];
  if (role) return [state, colours.roles[role]];
  return [state, state === "open" ? colours.openNode : colours.nodes[node.kind]];
}

function drawNode(data, view, panel, node, box, chosen, near) {
  const [state, [fill, stroke, ink]] = paintOf(data, view, panel, node);
  const isChosen = chosen.selected.has(node.name), isFocus = chosen.focus === node.index;
  const corner = (side, paint) => svgElement("circle", { cx: box.x + side * box.width / 2,
    cy: box.y - HALF, r: 4, fill: paint, stroke: "#ffffff" });
  return svgElement("g", { "data-node": node.name, "data-state": state,
    "data-selected": isChosen ? "" : null, "data-found": chosen.found.has(node.name) ? "" : null,
    opacity: nodeOpacity(node.index, chosen.found.has(node.name), near) },
  svgElement("rect", { x: box.x - box.width / 2, y: box.y - HALF, width: box.width,
    height: NODE_HEIGHT, rx: node.kind === "mlp" ? 3 : 9, fill: isFocus ? stroke : fill, stroke,
    "stroke-width": 1.3 }),
  svgText({ x: box.x, y: box.y + 4, fill: isFocus ? "#ffffff" : ink }, nodeText(node, view.labels)),
  view.pins.includes(node.name) ? corner(-1, "#c2410c") : "",
  view.notes[node.name] ? corner(1, "#b87a00") : "");
}

function marksOf(data, { layout, nodes }) {
  return (data.marked ?? []).flatMap(([colour, , names]) =>
    [...layout.boxes].filter(([i]) => names.includes(nodes[i].name.split("@")[0]))
      .map(([i, box]) => svgElement("rect", { "data-mark": nodes[i].name, fill: "none",
        x: box.x - box.width / 2 - 2, y: box.y - HALF - 2, width: box.width + 4,
        height: NODE_HEIGHT + 4, rx: 11, stroke: colour, "stroke-width": 2.2,
        "pointer-events": "none" })));
}

function legendOf(data, view, { panels, nodes }) {
  const { colours } = data, links = panels.flatMap((panel) => panel.links);
  const used = new Set(links.filter((k) => k.onPath).map((k) => fullColour(k, view, colours)));
  const crossing = [colours.slots[CROSSING], colours.words[CROSSING]];
  let words;
  if (view.difference) {
    const names = data.panels.map(({ name }) => `only ${name.slice(0, 60)}`);
    words = [[colours.only[0], names[0]], [colours.only[1], names[1]], [colours.plain, "both"], crossing];
  } else if (view.colour === "sign") {
    words = [[colours.helps, data.words.helps], [colours.hurts, data.words.hurts], crossing];
  } else {
    words = Object.entries(colours.words).map(([slot, text]) => [colours.slots[slot], text]);
  }
  const entries = words.filter(([colour]) => used.has(colour)).map(([colour, text]) => [colour, 3, text]);
  const isTrunk = ({ stroke }) => stroke === colours.shared;
  if (panels.some(({ shapes }) => shapes.some(isTrunk))) entries.push([colours.shared, 2, "trunk of several"]);
  if (links.some((k) => !k.onPath)) entries.push([colours.open, 2, "on no path from input to logits"]);
  if (links.length && data.panels.some((panel) => panel.scores)) {
    entries.push([colours.plain, lineWidth(1), `largest |${data.words.value}|`], [colours.plain, lineWidth(0.25), "\u00bc of it"]);
  }
  const roles = new Set(panels.flatMap((panel) => panel.links.flatMap(({ source, reader }) => [source, reader])
    .map((i) => roleOf(data, view, panel, nodes[i]))));
  for (const [role, [, stroke]] of Object.entries(colours.roles)) if (roles.has(role)) entries.push([stroke, 9, role]);
  for (const [colour, name] of data.marked ?? []) entries.push([colour, 2.2, name]);
  return entries;
}
