// Makes the static component diagram interactive: it shows fewer edges, or what is before and
// after a node. Paths and states follow the rules of drawn_circuit.py; all lines and coordinates
// are those of the static figure.

function start(root, data) {
  "use strict";
  const HOVER_DISTANCE = 6;
  const SAMPLE_STEP = 6;
  const LISTED = 6;
  const svg = root.querySelector("svg");
  const nodeIndex = new Map(data.nodes.map((node, index) => [node.name, index]));
  const INPUT = nodeIndex.get("input");
  const LOGITS = nodeIndex.get("logits");
  const mostEdges = Math.max(...data.panels.map((panel) => panel.edges.length));
  const state = { edges: mostEdges, colour: data.colour, focus: null };
  const panels = data.panels.map((panel, index) => {
    const group = svg.querySelector(`g[data-panel="${index}"]`);
    const part = (role) => group.querySelector(`[data-role="${role}"]`);
    // For each edge its lines, one to each of its readers.
    const drawn = new Map();
    for (const path of part("edges").children) {
      drawn.set(`${path.dataset.edge} ${path.dataset.reader}`, path);
    }
    const paths = panel.edges.map((edge, rank) => edge.readers.map(
      (reader) => drawn.get(`${rank} ${data.nodes[reader].name}`),
    ));
    const nodes = [...part("nodes").children];
    const ports = nodes.map((node) => [...node.querySelectorAll("circle")]);
    const hover = addHoverPath(part("nodes"), data.pointed);
    return { ...panel, index, group, part, paths, nodes, ports, hover, view: null };
  });

  // ---- what is shown -------------------------------------------------------------------------

  // The strongest edges; without scores there is no order in which to leave any out.
  function shownEdges(panel) {
    return panel.scored ? panel.edges.slice(0, state.edges) : panel.edges;
  }

  // All nodes that can be reached from one over the edges, upwards or downwards, itself included.
  function reach(edges, start, upwards) {
    const following = data.nodes.map(() => []);
    for (const edge of edges) {
      for (const reader of edge.readers) {
        if (upwards) following[edge.source].push(reader);
        else following[reader].push(edge.source);
      }
    }
    const reached = new Set([start]);
    // A set that grows is walked to its new end.
    for (const node of reached) following[node].forEach((next) => reached.add(next));
    return reached;
  }

  function selectView(panel) {
    const edges = shownEdges(panel);
    const [above, below] = [reach(edges, INPUT, true), reach(edges, LOGITS, false)];
    const between = (node) => above.has(node) && below.has(node);
    const linesOnPath = edges.map(
      (edge) => edge.readers.map((reader) => between(edge.source) && between(reader)),
    );
    const onPath = linesOnPath.map((lines) => lines.includes(true));
    const drawn = new Set(edges.flatMap((edge) => [edge.source, ...edge.readers]));
    const anyPath = onPath.includes(true);
    const states = data.nodes.map((_, node) => {
      if (anyPath && between(node)) return "path";
      return drawn.has(node) ? "open" : "absent";
    });
    const focus = state.focus && state.focus.panel === panel.index ? state.focus.node : null;
    return { edges, onPath, linesOnPath, states, ...selectFocus(edges, focus) };
  }

  // The ancestors and descendants of the chosen node, and the edges on the way to and from it.
  function selectFocus(edges, focus) {
    if (focus === null) return { focus, nearNode: () => true, nearEdge: () => true };
    const [before, after] = [reach(edges, focus, false), reach(edges, focus, true)];
    return {
      focus,
      nearNode: (node) => before.has(node) || after.has(node),
      nearEdge: (edge) => edge.readers.some((reader) => before.has(reader)) ||
        after.has(edge.source),
    };
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
    const view = (panel.view = selectView(panel));
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
    const words = `${number(view.edges.length)} of ${number(panel.nKept)} kept edges ` +
      `(model: ${number(panel.nExisting)}); ${number(onPath)} on a path from input to logits`;
    const weakest = view.edges.at(-1);
    return panel.scored ? `${words}; |score| \u2265 ${weakest.size}` : words;
  }

  function drawAll() {
    hideTip();
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
    addSlider(root, "Strongest edges", range, state.edges, String(state.edges), (value) => {
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
      setAttributes(group, {
        tabindex: node === LOGITS ? 0 : -1, role: "button", "aria-label": data.nodes[node].name,
      });
      group.addEventListener("click", () => toggleFocus(panel, node));
      group.addEventListener("focus", () => {
        if (group.matches(":focus-visible")) showNode(panel, node);
      });
      group.addEventListener("blur", hideTip);
      group.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          toggleFocus(panel, node);
          showNode(panel, node);
          event.preventDefault();
          return;
        }
        const next = neighbour(node, event.key);
        if (next === null) return;
        group.setAttribute("tabindex", -1);
        panel.nodes[next].setAttribute("tabindex", 0);
        panel.nodes[next].focus();
        event.preventDefault();
      });
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

  function toggleFocus(panel, node) {
    const old = state.focus;
    const same = old && old.panel === panel.index && old.node === node;
    state.focus = same ? null : { panel: panel.index, node };
    drawAll();
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

  function hideTip() {
    root.querySelector(".tip").hidden = true;
    for (const panel of panels) panel.hover.removeAttribute("d");
  }

  // The cubic curves that a line is made of, each as [x0, y0, ..., x3, y3]. Asking the browser for
  // points along the lines takes a minute where there are thousands.
  function curvesOf(path) {
    const numbers = path.getAttribute("d").match(/-?[\d.]+/g).map(Number);
    const n = (numbers.length - 2) / 6;
    return Array.from({ length: n }, (_, i) => numbers.slice(6 * i, 6 * i + 8));
  }

  function distanceToCurve(x, y, [x0, y0, x1, y1, x2, y2, x3, y3]) {
    // A curve stays between its four points.
    const [left, right] = [Math.min(x0, x1, x2, x3), Math.max(x0, x1, x2, x3)];
    const [top, bottom] = [Math.min(y0, y1, y2, y3), Math.max(y0, y1, y2, y3)];
    const outside = Math.max(left - x, x - right, top - y, y - bottom);
    if (outside > HOVER_DISTANCE + 1) return Infinity;
    const n = Math.max(4, Math.ceil((right - left + bottom - top) / SAMPLE_STEP));
    let [distance, fromX, fromY] = [Infinity, x0, y0];
    for (let i = 1; i <= n; i++) {
      const [t, s] = [i / n, 1 - i / n];
      const [a, b, c, d] = [s * s * s, 3 * s * s * t, 3 * s * t * t, t * t * t];
      const [toX, toY] = [a * x0 + b * x1 + c * x2 + d * x3, a * y0 + b * y1 + c * y2 + d * y3];
      distance = Math.min(distance, distanceToSegment(x, y, fromX, fromY, toX, toY));
      [fromX, fromY] = [toX, toY];
    }
    return distance;
  }

  function nearestEdge(panel, x, y) {
    panel.curves ??= panel.paths.map((lines) => lines.flatMap(curvesOf)); // lines never move
    let [best, bestDistance] = [null, HOVER_DISTANCE];
    panel.view.edges.forEach((edge, rank) => {
      if (!panel.view.nearEdge(edge)) return;
      let distance = Infinity;
      for (const curve of panel.curves[rank]) {
        distance = Math.min(distance, distanceToCurve(x, y, curve));
      }
      // Lines on a path win over light ones at about the same distance.
      if (panel.view.onPath[rank]) distance -= 1;
      if (distance < bestDistance) [best, bestDistance] = [rank, distance];
    });
    return best;
  }

  function onPointerMove(event) {
    const group = event.target.closest("g[data-panel]");
    hideTip();
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
  svg.setAttribute("role", "group");
  svg.addEventListener("pointermove", onPointerMove);
  svg.addEventListener("pointerleave", hideTip);
  onEscape(root, () => {
    state.focus = null;
    drawAll();
  });
  drawAll();
}
