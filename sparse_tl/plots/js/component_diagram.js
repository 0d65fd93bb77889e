// Makes the static component diagram interactive: draws every view of the circuits, and keeps the
// reader's choices as a state that can be saved and opened.

function start(root, data) {
  "use strict";
  const svg = root.querySelector("svg"), canvas = root.querySelector(".canvas");
  root.dataset.kind = "components";
  const tip = root.querySelector(".tip"), card = make("div", { class: "card", hidden: true });
  const status = make("div", { class: "status", role: "status" });
  root.querySelector(".controls").after(status);
  tip.before(card);
  const first = data.view, most = Math.max(1, ...data.panels.map((panel) =>
    (panel.countsNodes ? data.nodes : panel.names).length));
  let view = structuredClone(first), drawn = null, size = null, box = null;
  const chosen = { focus: null, focusName: null, panel: 0, selected: new Set(), found: new Set() };

  // ---- drawing -----------------------------------------------------------------------------

  function draw(keepsCard) {
    const width = Math.round(Math.min(1600, Math.max(680, canvas.clientWidth || 1000)));
    drawn = viewOf(data, view, width);
    const node = drawn.nodes.find(({ name }) => name === chosen.focusName);
    const isShown = node && drawn.layout.boxes.has(node.index);
    chosen.focus = isShown ? node.index : null;
    const [height, markup] = drawFigure(data, view, drawn, chosen);
    svg.innerHTML = markup;
    drawn.panels = findPanels(svg, drawn, data.colours.ink);
    size = [drawn.width, height];
    // Text is never scaled down: a figure of many positions scrolls sideways.
    setAttributes(svg, { width: drawn.width, height, style: `min-width: ${drawn.width}px` });
    setAttributes(root, { "data-edges": view.edges, "data-focus": chosen.focusName ?? "" });
    zoomTo(box);
    lit = String([chosen.focus, chosen.focus]);
    tip.hidden = true;
    listenToNodes();
    // Keeps text that the reader is typing on the card.
    if (!node) card.hidden = true;
    else if (!keepsCard) showCard(node);
    syncControls();
  }

  function change(changes, keepsCard) {
    view = { ...view, ...changes };
    status.textContent = "";  // it was about the previous view
    draw(keepsCard);
  }

  // Shows a part of the figure; null is the whole figure, with text at full size.
  function zoomTo(part) {
    box = part;
    const [x, y, w, h] = part ?? [0, 0, ...size];
    svg.setAttribute("viewBox", `${x} ${y} ${w} ${h}`);
    svg.toggleAttribute("data-zoomed", Boolean(part));
  }

  function zoom(factor, point) {
    const [x, y, w, h] = box ?? [0, 0, ...size], { x: px, y: py } = point ?? { x: x + w / 2, y: y + h / 2 };
    const width = w / factor;
    if (width >= size[0] * 0.999) zoomTo(null);
    else if (width > size[0] / 40) zoomTo([px - (px - x) / factor, py - (py - y) / factor, width, h / factor]);
  }

  // ---- nodes and links ---------------------------------------------------------------------

  function focusOn(name, panel) {
    [chosen.focusName, chosen.panel] = [name, panel ?? chosen.panel];
    draw();
  }

  function listenToNodes() {
    for (const panel of drawn.panels) {
      const groups = [...panel.part("nodes").children];
      panel.groups = new Map(groups.map((group) => [group.dataset.node, group]));
      for (const group of groups) {
        const { node } = group.dataset;
        const press = (event) => {
          if (event.shiftKey) {
            if (!chosen.selected.delete(node)) chosen.selected.add(node);
            draw();
          } else {
            focusOn(chosen.focusName === node ? null : node, panel.index);
          }
          if (event.type === "keydown") {
            svg.querySelector(`g[data-panel="${panel.index}"] g[data-node="${CSS.escape(node)}"]`)?.focus();
          }
        };
        addButton(group, node, node === "logits", press, groups);
        group.setAttribute("aria-pressed", node === chosen.focusName);
      }
    }
  }

  function showCard(node) {
    const index = Math.min(chosen.panel, drawn.panels.length - 1);
    fillCard(card, data, view, drawn, index, node, {
      go: (name) => focusOn(drawn.nodes[drawn.at[drawn.place.get(name)]].name),
      pin: (name) => change({ pins: view.pins.includes(name)
        ? view.pins.filter((pin) => pin !== name) : [...view.pins, name] }),
      label: (name, text) => change({ labels: { ...view.labels, [name]: text.trim() } }, true),
      note: (name, text) => change({ notes: { ...view.notes, [name]: text.trim() } }, true),
      ungroup: (name) => {
        const { [name]: _, ...groups } = view.groups;
        change({ groups });
      },
      close: () => focusOn(null),
    });
    // At the node's height, on the opposite side of the figure.
    const outer = root.getBoundingClientRect(), shown = svg.getBoundingClientRect();
    const at = drawn.layout.boxes.get(node.index) ?? { x: 0, y: 0 }, scale = shown.width / size[0];
    const x = at.x + drawn.panels[index].shift;
    const top = shown.top - outer.top + scale * (drawn.panels[index].top + drawn.above + at.y);
    card.style.left = `${x > size[0] / 2 ? 10 : Math.max(4, outer.width - 340)}px`;
    // Whole in the window, if that is high enough.
    const last = Math.min(outer.height, window.innerHeight - outer.top) - card.offsetHeight - 4;
    card.style.top = `${Math.max(4, 4 - outer.top, Math.min(top - 60, last))}px`;
  }

  function linkText(panel, shape) {
    const name = (i) => view.labels[drawn.nodes[i].name] || drawn.nodes[i].name;
    const links = shape.links.map((k) => panel.links[k]).sort((a, b) => b.strength - a.strength);
    if (links.length > 1) {
      const listed = links.slice(0, 8).map((link) => `\u2192 ${name(link.reader)}  ${worth(panel, link)}`);
      const more = links.length > 8 ? [`and ${links.length - 8} weaker`] : [];
      return [`${name(links[0].source)}, to ${links.length} readers`, ...listed, ...more];
    }
    const [link] = links, text = [`${name(link.source)} \u2192 ${name(link.reader)}`];
    if (link.slot === CROSSING) text.push("keys and values of this head, for its queries here");
    else {
      for (const { circuit: { name: whose, names, scores }, edges } of link.within) {
        if (view.difference) text.push(`${whose.slice(0, 40)}:`);
        for (const edge of [...edges].slice(0, 6)) {
          text.push(scores ? `${names[edge]}  ${scoreText(scores[edge], data.unit)}` : names[edge]);
        }
        if (edges.size > 6) text.push(`and ${edges.size - 6} more circuit edges`);
      }
    }
    text.push(worth(panel, link));
    if (!link.onPath) text.push("on no path from input to logits");
    for (const other of drawn.panels) {
      if (other === panel) continue;
      const same = other.links.find(({ key }) => key === link.key);
      text.push(`${other.name.slice(0, 40)}: ${same ? worth(other, same) : "not shown"}`);
    }
    return text;
  }

  function worth(panel, link) {
    const effect = !link.good ? "" : link.good > 0 ? ", helps" : ", hurts";
    return `influence ${percent(link.influence)}${effect}`;
  }

  // ---- the pointer -------------------------------------------------------------------------

  // Lights whole paths through what is under the pointer, or else in focus; the rest is faint.
  let lit = "";
  function light(source, ...readers) {
    if (lit === String([source, ...readers])) return;
    lit = String([source, ...readers]);
    for (const panel of drawn.panels) {
      const near = nearOf(panel, source, ...readers), lines = panel.part("links").children;
      panel.shapes.forEach((shape, i) => setAttributes(lines[i], panel.paint(shape, near)));
      for (const index of drawn.layout.boxes.keys()) {
        const { name } = drawn.nodes[index];
        setAttributes(panel.groups.get(name), { opacity: nodeOpacity(index, chosen.found.has(name), near) });
      }
    }
  }

  let drag = null;
  svg.addEventListener("pointerdown", (event) => {
    if (event.target.closest("g[data-node]") || event.button) return;
    drag = { x: event.clientX, y: event.clientY, box: box ?? [0, 0, ...size], moved: false };
  });
  svg.addEventListener("pointermove", (event) => {
    if (drag && event.buttons) {
      const scale = drag.box[2] / svg.getBoundingClientRect().width;
      const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
      drag.moved ||= Math.hypot(dx, dy) > 3;
      if (drag.moved && box) zoomTo([drag.box[0] - dx * scale, drag.box[1] - dy * scale, drag.box[2], drag.box[3]]);
      svg.classList.toggle("moving", Boolean(drag.moved && box));
      return;
    }
    hideMarks();
    const panel = panelAt(drawn.panels, event), node = event.target.closest("g[data-node]")?.dataset.node;
    const shape = panel && node === undefined
      ? nearestLine(panel.shapes, pointIn(panel.part("links"), event)) : null;
    const ends = (shape?.links ?? []).map((k) => panel.links[k]);
    const { index } = drawn.nodes.find(({ name }) => name === node) ?? { index: chosen.focus };
    light(ends[0]?.source ?? index, ...(shape ? ends.map(({ reader }) => reader) : [index]));
    if (!panel) return;
    if (node !== undefined) {
      for (const { groups } of drawn.panels) groups.get(node).toggleAttribute("data-same", true);
      const note = view.notes[node];
      if (note || view.labels[node]) showTip(root, [node.slice(0, 200), ...(note ? [note] : [])], event);
      return;
    }
    if (!shape) return;
    for (const other of drawn.panels) {
      const same = other === panel ? [shape] : counterparts(panel, shape, other);
      const strength = Math.max(0, ...same.map((one) => one.strength));
      const d = same.length ? same.map((one) => one.d).join("") : null;
      setAttributes(other.hover, { d, "stroke-width": lineWidth(strength) + 1 });
    }
    showTip(root, linkText(panel, shape), event);
  });
  // Removes the marks of the item under the pointer from all panels.
  function hideMarks() {
    hideTip(root, drawn.panels);
    for (const node of svg.querySelectorAll("[data-same]")) node.removeAttribute("data-same");
  }
  const drop = () => {
    drag = null;
    svg.classList.remove("moving");
  };
  svg.addEventListener("pointerup", drop);
  svg.addEventListener("pointerleave", () => {
    drop();
    hideMarks();
    light(chosen.focus, chosen.focus);
  });
  // The plain wheel scrolls the page; with Ctrl or Command, or a pinch, it zooms.
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 300), pointIn(svg, event));
  }, { passive: false });
  onEscape(root, () => {
    if (chosen.focusName === null && !chosen.selected.size) return;
    chosen.selected.clear();
    focusOn(null);
  });

  const syncControls = componentControls(root, data, {
    most, status, chosen, change, draw, focusOn, zoom, fit: () => zoomTo(null),
    view: () => view, drawn: () => drawn, svg,
    open: (state) => {
      view = { ...structuredClone(first), ...state };
      chosen.selected.clear();
      focusOn(null);
    },
  });
  draw();
  let width = canvas.clientWidth;
  new ResizeObserver(() => {
    if (canvas.clientWidth !== width && canvas.clientWidth) draw();
    width = canvas.clientWidth;
  }).observe(canvas);
}
