// The controls of a component diagram. Returns a function that updates them.

function componentControls(root, data, figure) {
  const { most, status, chosen, change, draw } = figure, view = () => figure.view();
  const scored = data.panels.some((panel) => panel.scores), updates = [];

  function save(name, type, text) {
    const link = make("a", { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function check(text, key) {
    const box = make("input", { type: "checkbox", name: key, onchange: () => change({ [key]: box.checked }) });
    updates.push(() => { box.checked = view()[key]; });
    addControl(root, text, box);
  }

  // Half of the slider's range is for the first sqrt(most) edges, which are legible.
  const counted = data.panels[0].countsNodes ? "nodes" : data.words.edges;
  const range = make("input", { type: "range", min: 0, max: 1000, "aria-label": counted,
    oninput: () => change({ edges: Math.round(most ** (range.value / 1000)) }) });
  const number = make("input", { type: "number", name: "edges", min: 1, max: most,
    onchange: () => change({ edges: Math.max(1, Math.min(most, Math.round(Number(number.value)) || 1)) }) });
  updates.push(() => {
    const edges = Math.min(most, view().edges);
    if (document.activeElement !== range) range.value = most > 1 ? 1000 * Math.log(edges) / Math.log(most) : 1000;
    number.value = edges;
  });
  addControl(root, counted[0].toUpperCase() + counted.slice(1), range, number);
  const select = (text, key, options) => {
    const made = addSelect(root, text, key, options, view()[key], (value) => change({ [key]: value }));
    updates.push(() => { made.value = view()[key]; });
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
      change({ groups: groupsOf(data, figure.drawn(), how) });
      const n = Object.keys(view().groups).length;
      status.textContent = n ? `${n} supernodes` : "no nodes to group";
    } else change({ groups: {} });
    grouping.value = how;
  });
  const group = make("button", { type: "button", name: "group", onclick: () => {
    const members = new Set(), groups = { ...view().groups };
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
    if (!Object.keys(view().groups).length) grouping.value = "";
    else if (grouping.value === "") grouping.value = "own";
  });

  // ---- search ------------------------------------------------------------------------------

  let turn = 0;
  function matches(text) {
    const words = text.trim().toLowerCase();
    if (!words) return [];
    return figure.drawn().nodes.map(({ name }) => name).filter((name) =>
      [name, view().labels[name], view().notes[name]].some((said) => said?.toLowerCase().includes(words)));
  }
  const search = make("input", { type: "search", name: "search", placeholder: "a3.h2", oninput: () => {
    turn = 0;
    const found = matches(search.value), boxes = figure.drawn().layout.boxes;
    chosen.found = new Set(found);
    const shown = figure.drawn().nodes.filter((node) => boxes.has(node.index) && chosen.found.has(node.name));
    status.textContent = search.value ? `${found.length} found, ${shown.length} of them shown` : "";
    draw();
  }, onkeydown: (event) => {
    const found = matches(search.value);
    if (event.key !== "Enter" || !found.length) return;
    event.preventDefault();
    const name = found[turn % found.length], { nodes, at, place } = figure.drawn();
    turn += 1;
    figure.focusOn(place.has(name) ? nodes[at[place.get(name)]].name : name);
  } });
  addControl(root, "Find", search);

  // ---- files and zoom ----------------------------------------------------------------------

  function opened(text) {
    try {
      const { format, ...state } = JSON.parse(text);
      if (format !== data.format) throw new Error(`expected a state with format "${data.format}"`);
      for (const [key, value] of Object.entries(state)) {
        const own = data.view[key];
        if (typeof own !== typeof value || Array.isArray(own) !== Array.isArray(value) || value === null) {
          throw new Error(`unexpected ${key}`);
        }
      }
      figure.open(state);
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
    figure.fit();
    const copy = figure.svg.cloneNode(true);
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    save("circuit.svg", "image/svg+xml", new XMLSerializer().serializeToString(copy));
  };
  root.querySelector(".controls").append(make("span", { class: "buttons" }, group,
    button("in", "+", "Zoom in (Ctrl and wheel)", () => figure.zoom(1.4)),
    button("out", "\u2212", "Zoom out", () => figure.zoom(1 / 1.4)),
    button("fit", "Fit", "See all", figure.fit),
    button("save", "Save state", "Save what is shown as a JSON file", () =>
      save("circuit.json", "application/json", JSON.stringify({ format: data.format, ...view() }, null, 1))),
    button("open", "Open state", "Open a saved state", () => file.click()),
    button("picture", "Save SVG", "Save the picture", picture), file));
  return () => updates.forEach((update) => update());
}
