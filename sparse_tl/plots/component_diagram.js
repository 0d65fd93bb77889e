// Makes the static component diagram interactive: it shows fewer edges, or what is before and
// after a node. All lines are those of the static figure.

function start(root, data) {
  "use strict";
  const LISTED = 6;
  const svg = root.querySelector("svg");
  const mostEdges = Math.max(...data.panels.map((panel) => panel.edges.length));
  const state = { edges: mostEdges, colour: data.colour, focus: null };
  const panels = findPanels(svg, data, data.pointed);
  for (const panel of panels) {
    panel.nodes = [...panel.part("nodes").children];
    panel.lines = [...panel.part("edges").children].map((path) => {
      const { edge, source, reader, slot } = path.dataset;
      const [rank, d] = [Number(edge), path.getAttribute("d")];
      return { path, rank, source, reader, slot, edge: panel.edges[rank], d };
    });
  }

  // ---- drawing -------------------------------------------------------------------------------

  // On a path from the input to the logits, drawn at least, or not: that to which these lines belong.
  function stateOf(lines) {
    if (!lines.length) return "absent";
    return lines.some((line) => line.onPath) ? "path" : "open";
  }

  function draw(panel) {
    const shown = panel.shown = panel.lines.filter((line) => line.rank < state.edges);
    const [above, below] = [reach(shown, "input", true), reach(shown, "logits", false)];
    for (const line of shown) line.onPath = above.has(line.source) && below.has(line.reader);
    const focus = state.focus?.panel === panel.index ? state.focus.node : null;
    const before = focus && reach(shown, focus, false);
    const after = focus && reach(shown, focus, true);
    panel.near = shown.filter((line) => !focus || before.has(line.reader) || after.has(line.source));
    drawLines(panel);
    for (const group of panel.nodes) {
      const { node } = group.dataset;
      drawNode(panel, group, node === focus, !focus || before.has(node) || after.has(node));
    }
    const edges = new Set(shown.map((line) => line.edge));
    panel.onPath = new Set(shown.filter((line) => line.onPath).map((line) => line.edge));
    panel.part("caption").textContent = caption(panel, edges);
    setAttributes(panel.group, {
      "data-edges-shown": edges.size, "data-edges-on-path": panel.onPath.size,
      "data-focus": focus ?? "",
    });
  }

  function drawLines(panel) {
    const near = new Set(panel.near);
    for (const line of panel.shown) {
      setAttributes(line.path, {
        "data-kind": stateOf([line]),
        stroke: line.onPath ? line.edge.strokes[state.colour] : data.openStroke,
        opacity: near.has(line) ? null : 0.13,
      });
    }
    // Strong lines over weak ones, and lines on a path over all others.
    panel.shown.sort((a, b) => a.onPath - b.onPath || b.rank - a.rank);
    panel.part("edges").replaceChildren(...panel.shown.map(({ path }) => path));
  }

  function drawNode(panel, group, isFocus, isNear) {
    const { node, kind } = group.dataset;
    const entering = panel.shown.filter((line) => line.reader === node);
    const found = stateOf([...entering, ...panel.shown.filter((line) => line.source === node)]);
    const paint = data.paint[kind][found];
    const [box, text, ...ports] = group.children;
    setAttributes(group, {
      "data-state": found, "aria-pressed": isFocus, opacity: isNear ? null : 0.3,
    });
    setAttributes(box, { fill: isFocus ? paint.stroke : paint.fill, stroke: paint.stroke });
    setAttributes(text, { fill: isFocus ? data.ground : paint.ink });
    for (const port of ports) {
      const { slot } = port.dataset;
      const entered = stateOf(entering.filter((line) => line.slot === slot));
      setAttributes(port, {
        display: entered === "absent" ? "none" : null,
        fill: entered === "path" ? data.slots[slot] : data.openPort,
      });
    }
  }

  function caption(panel, edges) {
    const number = (value) => value.toLocaleString("en-US");
    const words = `${number(edges.size)} of ${number(panel.nKept)} kept circuit edges ` +
      `(model: ${number(panel.nExisting)}); ${number(panel.onPath.size)} ` +
      "on a path from input to logits";
    if (!panel.scored) return words;
    return `${words}; |score| \u2265 ${panel.edges[edges.size - 1].score.replace("\u2212", "")}`;
  }

  function drawAll() {
    hideTip(root, panels);
    panels.forEach(draw);
    for (const legend of svg.querySelectorAll("[data-legend]")) {
      setAttributes(legend, { display: legend.dataset.legend === state.colour ? null : "none" });
    }
    setAttributes(root, { "data-edges": state.edges, "data-colour": state.colour });
  }

  // ---- controls ------------------------------------------------------------------------------

  function addControls() {
    if (!panels.some((panel) => panel.scored)) return;
    const range = { name: "edges", min: 1, max: mostEdges, step: 1 };
    addSlider(root, "Strongest circuit edges", range, state.edges, String(state.edges), (value) => {
      state.edges = value;
      drawAll();
      return String(value);
    });
    const colours = [["slot", "what reads"], ["sign", "helps or hurts"]];
    addSelect(root, "Colour", "colour", colours, state.colour, (value) => {
      state.colour = value;
      drawAll();
    });
  }

  // A click or Enter on a node shows what is before and after it.
  function addNodes(panel) {
    for (const group of panel.nodes) {
      const { node } = group.dataset;
      const press = (event) => {
        state.focus = toggled(state.focus, { panel: panel.index, node });
        drawAll();
        if (event.type === "keydown") showNode(panel, group);
      };
      addButton(group, node, node === "logits", press, panel.nodes);
      group.addEventListener("focus", () => {
        if (group.matches(":focus-visible")) showNode(panel, group);
      });
      group.addEventListener("blur", () => hideTip(root, panels));
    }
  }

  // ---- tooltip -------------------------------------------------------------------------------

  function edgeText(panel, { edge, rank }) {
    const text = [edge.name];
    if (edge.score) {
      const effect = edge.sign < 0 ? " (helps)" : edge.sign > 0 ? " (hurts)" : "";
      text.push(`score ${edge.score}${effect}`, `rank ${rank + 1} of ${panel.nKept} by |score|`);
    }
    if (!panel.onPath.has(edge)) text.push("on no path from input to logits");
    return text;
  }

  function nodeText(panel, node) {
    const list = (heading, end) => {
      const lines = panel.shown.filter((line) => line[end] === node);
      const edges = panel.edges.filter((edge) => lines.some((line) => line.edge === edge));
      if (!edges.length) return [];
      const words = edges.slice(0, LISTED).map(({ name, score }) => score ? `${name}  ${score}` : name);
      const more = edges.length > LISTED ? [`and ${edges.length - LISTED} weaker`] : [];
      return [`${heading} (${edges.length}):`, ...words, ...more];
    };
    const text = [...list("reads", "reader"), ...list("is read", "source")];
    return [node, ...(text.length ? text : ["no edge shown here"])];
  }

  function showNode(panel, group) {
    const box = group.getBoundingClientRect();
    const point = { clientX: box.right - 10, clientY: box.bottom - 8 };
    showTip(root, nodeText(panel, group.dataset.node), point);
  }

  function tell(panel, event) {
    const node = event.target.closest("g[data-node]");
    if (node) return nodeText(panel, node.dataset.node);
    const line = nearestLine(panel.near, pointIn(panel.part("content"), event));
    if (!line) return null;
    const lines = panel.lines.filter(({ edge }) => edge === line.edge);
    const width = Number(line.path.getAttribute("stroke-width")) + 0.8;
    setAttributes(panel.hover, { d: lines.map(({ d }) => d).join(""), "stroke-width": width });
    return edgeText(panel, line);
  }

  addControls();
  panels.forEach(addNodes);
  listen(root, svg, panels, tell, () => {
    state.focus = null;
    drawAll();
  });
  drawAll();
}
