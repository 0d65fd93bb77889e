// Makes the static component diagram interactive: it shows fewer edges, or what is before and
// after a node, as circuit_edges.js has it; all lines and coordinates are those of the static figure.

function start(root, data) {
  "use strict";
  const HOVER_DISTANCE = 6;
  const LISTED = 6;
  const svg = root.querySelector("svg");
  const nodeIndex = new Map(data.nodes.map((node, index) => [node.name, index]));
  const LOGITS = nodeIndex.get("logits");
  const mostEdges = Math.max(...data.panels.map((panel) => panel.edges.length));
  const state = { edges: mostEdges, colour: data.colour, focus: null };
  const panels = findPanels(svg, data, data.pointed);
  for (const panel of panels) {
    // For each edge its lines, one to each of its readers.
    const drawn = new Map();
    for (const path of panel.part("edges").children) {
      drawn.set(`${path.dataset.edge} ${path.dataset.reader}`, path);
    }
    panel.paths = panel.edges.map((edge, rank) => edge.readers.map(
      (reader) => drawn.get(`${rank} ${data.nodes[reader].name}`),
    ));
    panel.nodes = [...panel.part("nodes").children];
    panel.ports = panel.nodes.map((node) => [...node.querySelectorAll("circle")]);
  }

  // ---- drawing -------------------------------------------------------------------------------

  // With thousands of lines it is the elements that cost: only what changes is written.
  const written = new WeakMap();
  function update(element, attributes) {
    const old = written.get(element) ?? {};
    for (const [name, value] of Object.entries(attributes)) {
      if (old[name] !== value) setAttributes(element, { [name]: value });
    }
    written.set(element, attributes);
  }

  function draw(panel) {
    const view = (panel.view = selectView(panel, data, state));
    drawEdges(panel, view);
    const entered = enteredPorts(view);
    panel.nodes.forEach((_, node) => drawNode(panel, node, view, entered[node]));
    const onPath = view.onPath.filter(Boolean).length;
    panel.part("caption").textContent = caption(panel, view, onPath);
    setAttributes(panel.group, {
      "data-edges-shown": view.edges.length, "data-edges-on-path": onPath,
      "data-focus": view.focus === null ? "" : data.nodes[view.focus].name,
    });
  }

  function drawEdges(panel, view) {
    const lines = view.edges.flatMap((edge, rank) => {
      const opacity = view.nearEdge(edge) ? null : 0.13;
      return panel.paths[rank].map((path, reader) => {
        const onPath = view.linesOnPath[rank][reader];
        update(path, {
          "data-kind": onPath ? "path" : "open",
          stroke: onPath ? edge.strokes[state.colour] : data.openStroke, opacity,
        });
        return { path, rank, onPath };
      });
    });
    // Strong lines over weak ones, and lines on a path over all others.
    lines.sort((a, b) => a.onPath - b.onPath || b.rank - a.rank);
    arrange(panel.part("edges"), lines.map(({ path }) => path));
  }

  // Gives an element these children and leaves those alone that are in place already.
  function arrange(parent, children) {
    const wanted = new Set(children);
    for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
    let next = parent.firstElementChild;
    for (const child of children) {
      if (child === next) next = next.nextElementSibling;
      else parent.insertBefore(child, next);
    }
  }

  // For each node, the slots that a shown line enters, each with whether one on a path does.
  function enteredPorts(view) {
    const entered = data.nodes.map(() => ({}));
    view.edges.forEach((edge, rank) => edge.readers.forEach((reader, i) => {
      entered[reader][edge.slot] ||= view.linesOnPath[rank][i];
    }));
    return entered;
  }

  function drawNode(panel, node, view, entered) {
    const group = panel.nodes[node];
    const paint = data.paint[data.nodes[node].kind][view.states[node]];
    const isFocus = node === view.focus;
    const [box, text] = group.children;
    update(group, {
      "data-state": view.states[node], "aria-pressed": isFocus,
      opacity: view.nearNode(node) ? null : 0.3,
    });
    update(box, { fill: isFocus ? paint.stroke : paint.fill, stroke: paint.stroke });
    update(text, { fill: isFocus ? data.ground : paint.ink });
    for (const port of panel.ports[node]) {
      const { slot } = port.dataset;
      update(port, {
        display: slot in entered ? null : "none",
        fill: entered[slot] ? data.slots[slot] : data.openPort,
      });
    }
  }

  function caption(panel, view, onPath) {
    const number = (value) => value.toLocaleString("en-US");
    const words = `${number(view.edges.length)} of ${number(panel.nKept)} kept circuit edges ` +
      `(model: ${number(panel.nExisting)}); ${number(onPath)} on a path from input to logits`;
    const weakest = view.edges.at(-1);
    return panel.scored ? `${words}; |score| \u2265 ${weakest.size}` : words;
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

  // ---- nodes: click or Enter to see what is before and after, arrow keys to move ---------------

  function addNodes(panel) {
    panel.nodes.forEach((group, node) => {
      const press = (event) => {
        state.focus = toggled(state.focus, { panel: panel.index, node });
        drawAll();
        if (event.type === "keydown") showNode(panel, node);
      };
      addButton(group, data.nodes[node].name, node === LOGITS, press, (key) => {
        const next = neighbour(node, key);
        return next === null ? null : panel.nodes[next];
      });
      group.addEventListener("focus", () => {
        if (group.matches(":focus-visible")) showNode(panel, node);
      });
      group.addEventListener("blur", () => hideTip(root, panels));
    });
  }

  // The next node in its row, or the nearest one in the next row.
  function neighbour(node, key) {
    const { x, y } = data.nodes[node];
    const along = { ArrowLeft: -1, ArrowRight: 1 }[key];
    const across = { ArrowUp: -1, ArrowDown: 1 }[key];
    if (!along && !across) return null;
    const ahead = data.nodes
      .map((other, index) => ({ index, dx: other.x - x, dy: other.y - y }))
      .filter(({ dx, dy }) => (along ? dy === 0 && along * dx > 0 : across * dy > 0));
    const far = ({ dx, dy }) => (along ? Math.abs(dx) : 10000 * Math.abs(dy) + Math.abs(dx));
    ahead.sort((a, b) => far(a) - far(b));
    return ahead.length ? ahead[0].index : null;
  }

  // ---- tooltip -------------------------------------------------------------------------------

  function edgeLine(edge) {
    return edge.score === undefined ? edge.name : `${edge.name}  ${edge.score}`;
  }

  function edgeText(panel, edge) {
    const text = [edge.name];
    if (edge.score !== undefined) {
      const effect = edge.sign < 0 ? " (helps)" : edge.sign > 0 ? " (hurts)" : "";
      const rank = panel.edges.indexOf(edge) + 1;
      text.push(`score ${edge.score}${effect}`, `rank ${rank} of ${panel.nKept} by |score|`);
    }
    if (!panel.view.onPath[panel.edges.indexOf(edge)]) text.push("on no path from input to logits");
    return text;
  }

  function nodeText(panel, node) {
    const { edges } = panel.view;
    const list = (heading, found) => {
      if (!found.length) return [];
      const more = found.length > LISTED ? [`and ${found.length - LISTED} weaker`] : [];
      return [`${heading} (${found.length}):`, ...found.slice(0, LISTED).map(edgeLine), ...more];
    };
    const text = [
      ...list("reads", edges.filter((edge) => edge.readers.includes(node))),
      ...list("is read", edges.filter((edge) => edge.source === node)),
    ];
    return [data.nodes[node].name, ...(text.length ? text : ["no edge shown here"])];
  }

  function showNode(panel, node) {
    const box = panel.nodes[node].getBoundingClientRect();
    showTip(root, nodeText(panel, node), { clientX: box.right - 10, clientY: box.bottom - 8 });
  }

  function nearestEdge(panel, x, y) {
    panel.curves ??= panel.paths.map((lines) => lines.flatMap(curvesOf)); // lines never move
    let [best, bestDistance] = [null, HOVER_DISTANCE];
    panel.view.edges.forEach((edge, rank) => {
      if (!panel.view.nearEdge(edge)) return;
      let distance = Infinity;
      for (const curve of panel.curves[rank]) {
        distance = Math.min(distance, distanceToCurve(x, y, HOVER_DISTANCE + 1, curve));
      }
      // Lines on a path win over light ones at about the same distance.
      if (panel.view.onPath[rank]) distance -= 1;
      if (distance < bestDistance) [best, bestDistance] = [rank, distance];
    });
    return best;
  }

  function onPointerMove(event) {
    const group = event.target.closest("g[data-panel]");
    hideTip(root, panels);
    if (!group) return;
    const panel = panels[Number(group.dataset.panel)];
    const nodeGroup = event.target.closest("g[data-node]");
    if (nodeGroup) {
      showTip(root, nodeText(panel, nodeIndex.get(nodeGroup.dataset.node)), event);
      return;
    }
    const point = pointIn(panel.part("content"), event);
    const rank = nearestEdge(panel, point.x, point.y);
    if (rank === null) return;
    const lines = panel.paths[rank];
    const width = Number(lines[0].getAttribute("stroke-width")) + 0.8;
    const d = lines.map((line) => line.getAttribute("d")).join("");
    setAttributes(panel.hover, { d, "stroke-width": width });
    showTip(root, edgeText(panel, panel.edges[rank]), event);
  }

  addControls();
  panels.forEach(addNodes);
  listen(root, svg, onPointerMove, () => hideTip(root, panels), () => {
    state.focus = null;
    drawAll();
  });
  drawAll();
}
