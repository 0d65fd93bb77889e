// The card of a node: tables of its edges, label and note, and buttons to pin or ungroup it.

const MOST_ROWS = 100;

function scoreText(score, unit) {
  const text = Number(score.toPrecision(3)).toString().replace("-", "\u2212");
  return unit ? `${text} ${unit}` : text;
}

const percent = (share) => `${Number((100 * share).toPrecision(2))} %`;

// All lines of one of the panel's circuits at a node, strongest first, and whether each is shown.
function linesAt(panel, circuit, node, end) {
  const members = new Set(node.members ?? [node.index]), other = 1 - end;
  const shown = new Set(panel.links.flatMap(({ within }) => within)
    .flatMap((one) => (one.circuit === circuit ? one.lines : [])));
  return circuit.lines.flatMap((line, i) => {
    if (!members.has(line[end]) || members.has(line[other])) return [];
    const score = circuit.scores && line[3] >= 0 ? circuit.scores[line[3]] : null;
    const influence = circuit.influence[i];
    return [{ other: line[other], slot: line[2], score, influence, shown: shown.has(i) }];
  }).sort((a, b) => b.influence - a.influence || Math.abs(b.score ?? 0) - Math.abs(a.score ?? 0));
}

function edgeTable(data, panel, circuit, node, end, words, go) {
  const lines = linesAt(panel, circuit, node, end);
  const heading = panel.circuits.length > 1 ? `${words}, in ${circuit.name.slice(0, 40)}` : words;
  const hidden = lines.filter((line) => !line.shown).length;
  const count = hidden ? `${lines.length}, ${hidden} of them not shown` : lines.length;
  const rows = lines.slice(0, MOST_ROWS).map((line) => {
    const name = data.nodes[line.other][0];
    return make("tr", { class: line.shown ? "" : "hidden" },
      make("td", {}, make("button", { type: "button", onclick: () => go(name) }, name.slice(0, 80))),
      make("td", {}, line.slot), make("td", {}, line.score === null ? "" : scoreText(line.score, "")),
      make("td", {}, percent(line.influence)));
  });
  const more = lines.length > MOST_ROWS ? [make("p", {}, `and ${lines.length - MOST_ROWS} of less influence`)] : [];
  const head = ["", "slot", data.words.value, "influence"].map((text) => make("th", {}, text));
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
  return [make("h4", {}, `${heading} (${count})`), ...(lines.length ? [table] : []), ...more];
}

// The neurons of an MLP, strongest first; each opens to its tokens and the logits that it changes.
function neuronList(found, name, unit) {
  const ends = ([clean, corrupted]) => `${scoreText(clean, "")} \u2192 ${scoreText(corrupted, "")}`;
  const rest = found.readers.length - 6;
  const readers = found.readers.slice(0, 6).join(", ") + (rest > 0 ? ` and ${rest} more` : "");
  const spans = (texts) => texts.map((text) => make("span", {}, text));
  const logits = (word, tokens) => (tokens.length
    ? [make("p", {}, word, ...tokens.flatMap((token) => [" ", make("mark", {}, token)]))] : []);
  const rows = found.rows.map((row) => make("details", {},
    make("summary", {}, ...spans([row.name, scoreText(row.effect, ""), ends(row.means)])),
    ...row.tokens.map(({ text: [before, token, after], values }) => make("p", { class: "prompt" },
      before, make("mark", {}, token), after, make("span", {}, `  ${ends(values)}`))),
    ...logits("promotes", row.promotes), ...logits("suppresses", row.suppresses)));
  const count = `${found.rows.length} of ${found.count.toLocaleString("en-US")}`;
  return [make("h4", {}, `neurons${name ? ` in ${name}` : ""} (${count})`),
    make("p", {}, `Exact effect of each, as read by ${readers}; negative: it helps. Mean activation, clean \u2192 corrupted.`),
    make("div", { class: "neurons" },
      make("div", { class: "titles" }, ...spans(["", `effect${unit ? ` (${unit})` : ""}`, "activation"])), ...rows)];
}

// The neurons of a node in its panel, or in both if two circuits are drawn as one.
function neuronsAt(data, view, panelIndex, node) {
  const mlp = node.name.split("@")[0];
  return (data.neurons ?? []).flatMap((lists, i) => (Object.hasOwn(lists, mlp) && (view.difference || i === panelIndex)
    ? neuronList(lists[mlp], view.difference ? data.panels[i].name.slice(0, 40) : "", data.unit) : []));
}

// What is said of a node of one panel: pairs of a name and a text, and lists of tokens.
function factsAt(panel, node) {
  const found = panel.circuits[0].facts?.[node.name];
  if (!found) return [];
  const rows = found.values.map(([name, value]) => make("tr", {}, make("td", {}, name), make("td", {}, value)));
  const lists = found.lists.filter(([, tokens]) => tokens.length).map(([word, tokens]) =>
    make("p", {}, word, ...tokens.flatMap((token) => [" ", make("mark", {}, token)])));
  const examples = found.examples.map(([before, token, after, value]) => make("p", { class: "prompt" },
    before, make("mark", {}, token), after, make("span", {}, `  ${value}`)));
  const heading = examples.length ? [make("h4", {}, "strongest in the text given")] : [];
  return [make("table", {}, make("tbody", {}, ...rows)), ...lists, ...heading, ...examples];
}

// Fills the card; with a kernel, `data.live` gives an element for nodes of a panel. Its functions in `act` change the view: {go, pin, label, note, ungroup, close}.
function fillCard(card, data, view, drawn, panelIndex, node, act) {
  const panel = drawn.panels[panelIndex], { name } = node, pinned = view.pins.includes(name);
  const field = (tag, key, text) => {
    const input = make(tag, { name: key, placeholder: text, maxlength: key === "label" ? 60 : 2000,
      "aria-label": text, onchange: () => act[key](name, input.value) });
    input.value = (key === "label" ? view.labels : view.notes)[name] ?? "";
    return input;
  };
  const place = node.kind === "group" ? `${node.size} nodes` : node.layer === null ? "" : `layer ${node.layer}`;
  const where = [place, drawn.panels.length > 1 ? panel.name.slice(0, 40) : ""].filter(Boolean).join(", ");
  const buttons = node.kind === "group"
    ? [make("button", { type: "button", name: "ungroup", onclick: () => act.ungroup(name) }, "Ungroup")]
    : [make("button", { type: "button", name: "pin", onclick: () => act.pin(name) }, pinned ? "Unpin" : "Pin")];
  const live = data.live && panel.circuits.length === 1 ? (node.members ?? [node.index]).map((i) => data.nodes[i])
    .filter(([one, kind]) => kind !== "input" && kind !== "logits" && one in panel.circuits[0].facts) : [];
  const scaled = live.length ? [data.live(panel.index, live.map(([one]) => one))] : [];
  const members = node.members
    ? [make("p", {}, node.members.map((i) => data.nodes[i][0]).join(", ").slice(0, 2000))] : [];
  card.replaceChildren(
    make("div", { class: "head" }, make("strong", {}, name.slice(0, 200)), make("span", {}, where), ...buttons,
      make("button", { type: "button", name: "close", "aria-label": "Close", onclick: act.close }, "\u00d7")),
    ...scaled,
    ...(node.members ? [] : factsAt(panel, node)),
    field("input", "label", "own label"), field("textarea", "note", "note"), ...members,
    ...(node.members ? [] : neuronsAt(data, view, panelIndex, node)),
    ...panel.circuits.flatMap((circuit) => [
      ...edgeTable(data, panel, circuit, node, 1, "reads", act.go),
      ...edgeTable(data, panel, circuit, node, 0, "is read by", act.go),
    ]),
  );
  card.hidden = false;
}
