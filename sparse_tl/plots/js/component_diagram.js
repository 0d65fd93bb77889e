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
    updates.forEach((update) => update());
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

  // ---- controls ----------------------------------------------------------------------------

  const scored = data.panels.some((panel) => panel.scores), updates = []; // after every drawing

  function save(name, type, text) {
    const link = make("a", { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function check(text, key) {
    const box = make("input", { type: "checkbox", name: key, onchange: () => change({ [key]: box.checked }) });
    updates.push(() => { box.checked = view[key]; });
    addControl(root, text, box);
  }

  // Half of the slider's range is for the first sqrt(most) edges, which are legible.
  const counted = data.panels[0].countsNodes ? "nodes" : data.words.edges;
  const range = make("input", { type: "range", min: 0, max: 1000, "aria-label": counted,
    oninput: () => change({ edges: Math.round(most ** (range.value / 1000)) }) });
  const number = make("input", { type: "number", name: "edges", min: 1, max: most,
    onchange: () => change({ edges: Math.max(1, Math.min(most, Math.round(Number(number.value)) || 1)) }) });
  updates.push(() => {
    const edges = Math.min(most, view.edges);
    if (document.activeElement !== range) range.value = most > 1 ? 1000 * Math.log(edges) / Math.log(most) : 1000;
    number.value = edges;
  });
  addControl(root, counted[0].toUpperCase() + counted.slice(1), range, number);
  const select = (text, key, options) => {
    const made = addSelect(root, text, key, options, view[key], (value) => change({ [key]: value }));
    updates.push(() => { made.value = view[key]; });
  };
  if (scored) {
    select("Ranked by", "by", [["influence", "influence on the answer"], ["score", `|${data.words.value}|`]]);
    if (data.slots) select("Colour", "colour", [["slot", "what reads"], ["sign", "helps or hurts"]]);
  }
  if (data.slots) check("q, k, v apart", "slots");
  check("Edges on no path", "off_path");
  if (data.panels.length === 2) check("Difference", "difference");

  // ---- supernodes --------------------------------------------------------------------------

  const ways = [["", "none"], ["2", "layers in twos"], ["3", "layers in threes"], ["4", "layers in fours"],
    ["readers", "same layer and readers"], ["own", "own"]];
  const grouping = addSelect(root, "Supernodes", "groups", ways, "", (how) => {
    if (how === "own") return;
    if (how !== "") {
      chosen.selected.clear();
      change({ groups: {} });
      change({ groups: groupsOf(data, drawn, how) });
      const n = Object.keys(view.groups).length;
      status.textContent = n ? `${n} supernodes` : "no nodes to group";
    } else change({ groups: {} });
    grouping.value = how;
  });
  const group = make("button", { type: "button", name: "group", onclick: () => {
    const members = new Set(), groups = { ...view.groups };
    for (const name of chosen.selected) {
      for (const member of groups[name] ?? [name]) members.add(member);
      delete groups[name];
    }
    for (const name of Object.keys(groups)) groups[name] = groups[name].filter((one) => !members.has(one));
    let n = 1;
    while (`Group ${n}` in groups) n += 1;
    groups[`Group ${n}`] = [...members];
    chosen.selected.clear();
    chosen.focusName = `Group ${n}`;
    change({ groups });
  } }, "Group selected");
  updates.push(() => {
    group.disabled = chosen.selected.size < 2;
    group.title = "Shift-click nodes to select them";
    if (!Object.keys(view.groups).length) grouping.value = "";
    else if (grouping.value === "") grouping.value = "own";
  });

  // ---- search ------------------------------------------------------------------------------

  let turn = 0;
  function matches(text) {
    const words = text.trim().toLowerCase();
    if (!words) return [];
    return drawn.nodes.map(({ name }) => name).filter((name) =>
      [name, view.labels[name], view.notes[name]].some((said) => said?.toLowerCase().includes(words)));
  }
  const search = make("input", { type: "search", name: "search", placeholder: "a3.h2", oninput: () => {
    turn = 0;
    const found = matches(search.value), boxes = drawn.layout.boxes;
    chosen.found = new Set(found);
    const shown = drawn.nodes.filter((node) => boxes.has(node.index) && chosen.found.has(node.name));
    status.textContent = search.value ? `${found.length} found, ${shown.length} of them shown` : "";
    draw();
  }, onkeydown: (event) => {
    const found = matches(search.value);
    if (event.key !== "Enter" || !found.length) return;
    event.preventDefault();
    const name = found[turn % found.length], { nodes, at, place } = drawn;
    turn += 1;
    focusOn(place.has(name) ? nodes[at[place.get(name)]].name : name);
  } });
  addControl(root, "Find", search);

  // ---- files and zoom ----------------------------------------------------------------------

  function opened(text) {
    try {
      const { format, ...state } = JSON.parse(text);
      if (format !== data.format) throw new Error(`expected a state with format "${data.format}"`);
      view = { ...structuredClone(first), ...state };
      chosen.selected.clear();
      focusOn(null);
      status.textContent = "opened";
    } catch (error) {
      status.textContent = `not opened: ${error.message}`;
    }
  }
  const file = make("input", { type: "file", accept: ".json", hidden: true, name: "state",
    onchange: async () => {
      if (file.files.length) opened(await file.files[0].text());
      file.value = "";
    } });
  const button = (name, text, title, press) => make("button", { type: "button", name, title, onclick: press }, text);
  const picture = () => {
    zoomTo(null);
    const copy = svg.cloneNode(true);
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    save("circuit.svg", "image/svg+xml", new XMLSerializer().serializeToString(copy));
  };
  root.querySelector(".controls").append(make("span", { class: "buttons" }, group,
    button("in", "+", "Zoom in (Ctrl and wheel)", () => zoom(1.4)),
    button("out", "\u2212", "Zoom out", () => zoom(1 / 1.4)),
    button("fit", "Fit", "See all", () => zoomTo(null)),
    button("save", "Save state", "Save what is shown as a JSON file", () =>
      save("circuit.json", "application/json", JSON.stringify({ format: data.format, ...view }, null, 1))),
    button("open", "Open state", "Open a saved state", () => file.click()),
    button("picture", "Save SVG", "Save the picture", picture), file));

  draw();
  let width = canvas.clientWidth;
  new ResizeObserver(() => {
    if (canvas.clientWidth !== width && canvas.clientWidth) draw();
    width = canvas.clientWidth;
  }).observe(canvas);
}
