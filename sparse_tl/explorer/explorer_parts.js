// The cards beside the diagram: output tokens, heads, removed parts, and the attention of a node.
// Each function makes content of a card from the numbers that the kernel sent.

// Numbers with two decimals; changes have a plus or minus.
function plain(number, signDisplay = "negative") {
  const digits = { minimumFractionDigits: 2, maximumFractionDigits: 2, signDisplay, useGrouping: false };
  return number.toLocaleString("en-US", digits).replace("-", "\u2212");
}

const signed = (number) => plain(number, "exceptZero");

function percent(share) {
  if (share > 0 && share < 0.0005) return "<0.1 %";
  return `${(100 * share).toFixed(1)} %`;
}

const headName = (layer, head) => `a${layer}.h${head}`;
const edgeName = ([layer, head, query, key]) => `${headName(layer, head)} ${key}\u2192${query}`;

// As in the diagram: blue, or orange below 0, and darker for larger |share|, up to 1. Behind numbers,
// middle shades are left out: no text colour is legible on them in both themes.
function shade(share, isBehindNumber) {
  const size = Math.min(1, Math.abs(share)) ** 0.6;
  const t = !isBehindNumber ? size : size < 0.5 ? 0.76 * size : 0.32 + 0.68 * size;
  const [light, dark] = share < 0 ? [[254, 249, 246], [168, 62, 14]] : [[247, 250, 254], [8, 48, 122]];
  const mixed = light.map((from, i) => Math.round(from + (dark[i] - from) * t));
  return { background: `rgb(${mixed.join(", ")})`, color: t > 0.5 ? "#ffffff" : "#16181d" };
}

function token(text) {
  return make("span", { class: "token" }, text);
}

// A line on the effect of the removals on a panel's prediction.
function outcome({ name, outputs, quantity, values }, target) {
  const rows = outputs[target];
  const best = rows.reduce((a, b) => (b.logit_before > a.logit_before ? b : a));
  const [before, now] = values[target];
  const delta = now - before;
  const change = Math.abs(delta) < 0.005 ? "" : make(
    "span", { class: delta < 0 ? "less" : "more" }, ` (${signed(delta)})`,
  );
  const other = rows[0].token === best.token ? "" : make(
    "span", { class: "less" }, " now predicts ", token(rows[0].token),
  );
  return make("span", { class: "outcome", "data-outcome": name },
    make("b", {}, name), token(best.token),
    make("span", {}, `${quantityText(quantity, target)} ${plain(now)}`, change), other);
}

// The columns of a table of tokens, with log-probabilities, or with logits if the metric uses them.
function outputColumns({ quantity: { metric }, removedHeads, removedEdges }) {
  const [name, key] = metric === "log_probability" ? ["log P", "log_probability"] : ["logit", "logit"];
  if (!removedHeads.length && !removedEdges.length) {
    return { [name]: (row) => plain(row[key]), probability: share };
  }
  return {
    [`${name} before`]: (row) => plain(row[`${key}_before`]),
    now: (row) => plain(row[key]),
    change: (row) => change(row[key] - row[`${key}_before`]),
    probability: share,
  };
}

const LENS_COLUMNS = { logit: (row) => plain(row.logit), probability: share };

function change(delta) {
  if (delta === 0) return "";
  const kind = delta < -0.005 ? "less" : delta > 0.005 ? "more" : "same";
  return make("span", { class: kind }, signed(delta));
}

function share({ probability }) {
  const bar = make("span", { class: "bar" });
  bar.style.width = `${(100 * probability).toFixed(1)}%`;
  return make("div", { class: "share" }, bar, make("span", {}, percent(probability)));
}

function tokenTable(rows, columns) {
  const heads = ["token", ...Object.keys(columns)].map((name) => make("th", { scope: "col" }, name));
  const lines = rows.map((row, rank) => make("tr", {
    class: rank === 0 ? "first" : null, "data-token": row.token,
  }, make("th", { scope: "row" }, token(row.token)),
  ...Object.values(columns).map((cell) => make("td", {}, cell(row)))));
  return make("table", { class: "outputs" },
    make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...lines));
}

// A cell of a grid: a button that removes or restores a part of the model.
function partCell({ name, data, removed, weight, number = "", words, onToggle, onHover }) {
  const lines = removed ? ["removed; click to restore it"] : [...words, "click to remove it"];
  const cell = make("button", {
    type: "button", class: "cell", ...data, "aria-pressed": String(removed),
    "aria-label": [name, ...lines.slice(0, -1), removed ? "removed" : ""].filter(Boolean).join(", "),
    onclick: onToggle, onpointermove: (event) => onHover([name, ...lines], event),
  }, removed ? "" : number);
  if (!removed && weight === null) cell.classList.add("unknown");
  else if (!removed) Object.assign(cell.style, shade(weight, number));
  return cell;
}

// ---- exact effects: of each part, [effect, probability, prediction] for every target -----------

// The effect of removing a part, in words; negative if the part helps.
function effectText([effect, probability, prediction], before, { unit }) {
  const change = [threeDigits(effect, "exceptZero"), unit].filter(Boolean).join(" ");
  const points = `${threeDigits(100 * probability, "exceptZero")} percentage points`;
  const then = prediction === before ? "still predicts" : "predicts";
  return `${change}, ${points}, ${then} \u201c${prediction}\u201d`;
}

// An effect as one line in the colours of the grids: blue for parts that help.
function effectLine(name, [effect, , prediction], before, { unit }) {
  const then = prediction === before ? [] : [", predicts ", token(prediction)];
  const change = [signed(effect), unit].filter(Boolean).join(" ");
  return make("li", { "data-effect": name }, `without ${name}: `,
    make("span", { class: effect < 0 ? "helps" : "hurts" }, change), ...then);
}

// The parts with the largest effects.
function effectList(named, before, quantity) {
  const MOST = 3;
  const strongest = named.filter(([, known]) => known && Math.abs(known[0]) >= 0.005)
    .sort(([, a], [, b]) => Math.abs(b[0]) - Math.abs(a[0])).slice(0, MOST);
  return make("ul", { class: "effects" },
    ...strongest.map(([name, known]) => effectLine(name, known, before, quantity)));
}

// The number of heads whose effects are known, while others are computed.
function progressText(model) {
  const sum = (counts) => counts.reduce((a, b) => a + b, 0);
  const all = sum(model.get("_panels").map(({ shape: [nLayers, nHeads] }) => nLayers * nHeads));
  const known = sum(model.get("_effects").heads.map((heads) => Object.keys(heads).length));
  return known < all ? `effects: ${known} of ${all} heads \u2026` : "effects of edges \u2026";
}

const NOT_YET = "effect of removing it: not computed yet";

// A grid of layers and heads, darker for larger effects of removing a head.
function headGrid({ panel, target, effects, before, onToggle, onHover }) {
  const { shape: [nLayers, nHeads], quantity } = panel;
  const all = Object.values(effects).map((targets) => targets[target][0]);
  const largest = Math.max(1e-9, ...all.map(Math.abs));
  const removed = new Set(panel.removedHeads.map(String));
  const grid = make("div", { class: nLayers > 12 ? "heads deep" : "heads", role: "group", "aria-label": "heads" });
  grid.style.setProperty("--heads", nHeads);
  for (let layer = nLayers - 1; layer >= 0; layer--) {
    grid.append(make("span", { class: "axis" }, `${layer}`));
    for (let head = 0; head < nHeads; head++) {
      const known = effects[`${layer},${head}`]?.[target];
      grid.append(partCell({
        name: headName(layer, head), data: { "data-head": `${layer},${head}` },
        removed: removed.has(`${layer},${head}`), weight: known ? -known[0] / largest : null,
        words: [known ? `without it: ${effectText(known, before, quantity)}` : NOT_YET],
        onToggle: () => onToggle(layer, head), onHover,
      }));
    }
  }
  const axis = Array.from({ length: nHeads }, (_, head) => make("span", { class: "axis" }, `${head}`));
  grid.append(make("span", {}), ...axis);
  return make("div", { class: "scroll" }, grid);
}

// Attention from every head of a layer into one node, by source column.
function heatMap({ node, quantity, target, effects, before, onToggle, onHover }) {
  const { level, column, keys, attention, removed, open } = node;
  const grid = make("div", { class: "heat", role: "group", "aria-label": "attention into the node" });
  grid.style.setProperty("--keys", keys.length);
  attention.forEach((row, head) => {
    grid.append(make("span", { class: "axis" }, headName(level - 1, head)));
    row.forEach((weight, i) => {
      const edge = [level - 1, head, column, keys[i].key];
      const known = effects[edge.join(",")]?.[target];
      grid.append(partCell({
        name: edgeName(edge), data: { "data-edge": edge.join(",") }, removed: removed[head][i], weight,
        number: weight >= 0.005 ? weight.toFixed(2).replace(/^0/, "") : "",
        words: [
          `from position ${keys[i].key}: \u201c${keys[i].text}\u201d`,
          `attention ${weight.toFixed(3)}`,
          known ? `without it: ${effectText(known, before, quantity)}` :
            open[head][i] ? NOT_YET : "gate closed: removing it changes nothing",
        ],
        onToggle: () => onToggle(edge), onHover,
      }));
    });
  });
  const axis = keys.map(({ key, text }) =>
    make("span", { class: "axis key", title: `position ${key}: \u201c${text}\u201d` }, text));
  grid.append(make("span", {}), ...axis);
  return make("div", { class: "scroll" }, grid);
}

// The removed heads and edges of a panel, each with a button that restores it.
function chips({ panel, onHead, onEdge }) {
  const MOST = 16;
  const all = [
    ...panel.removedHeads.map(([layer, head]) => [headName(layer, head), () => onHead(layer, head)]),
    ...panel.removedEdges.map((edge) => [edgeName(edge), () => onEdge(edge)]),
  ];
  const shown = all.slice(0, MOST).map(([name, restore]) =>
    make("span", { class: "chip", "data-chip": name }, name,
      make("button", { type: "button", "aria-label": `restore ${name}`, onclick: restore }, "\u00d7")),
  );
  if (all.length > MOST) shown.push(make("span", { class: "more-chips" }, `and ${all.length - MOST} more`));
  return make("div", { class: "chips" }, ...shown);
}

function card(attributes, title, subtitle, ...content) {
  const heading = make("h4", {}, title, make("small", {}, subtitle));
  return make("section", { class: "card", ...attributes }, heading, ...content);
}

// The prediction of a panel at a target, its heads, and its removed parts.
function panelCard({ panel, index, target, column, effects, request, onHover }) {
  const onHead = (layer, head) => request({ action: "toggle_head", panel: index, layer, head });
  const onEdge = (edge) => {
    request({ action: "toggle_attention_edges", panel: index, edges: [edge] });
  };
  const before = panel.outputs[target][0].token;
  const named = Object.entries(effects).map(([index, targets]) =>
    [headName(...index.split(",")), targets[target]]);
  return card({ "data-panel": index }, panel.name, `output at position ${column}`,
    tokenTable(panel.outputs[target], outputColumns(panel)),
    make("h5", {}, "Heads",
      make("small", {}, `${quantityText(panel.quantity, target)} without each: blue helps, orange hurts`)),
    headGrid({ panel, target, effects, before, onToggle: onHead, onHover }),
    effectList(named, before, panel.quantity),
    chips({ panel, onHead, onEdge }));
}

// The attention of a node, and its logit lens.
function nodeCard({ node, panel, target, effects, request, onHover }) {
  const place = node.level ? `after layer ${node.level - 1}` : "input";
  const { quantity } = panel;
  const before = panel.outputs[target][0].token;
  const parts = make("div", { class: "parts" });
  const whole = effects.all?.[target];
  const read = node.level ? "its attention" : "others\u2019 attention to it";
  if (whole) parts.append(make("ul", { class: "effects whole" }, effectLine(read, whole, before, quantity)));
  if (node.level) {
    const subtitle = node.keys.length < node.nKeys
      ? `the ${node.keys.length} of ${node.nKeys} source positions with the most attention`
      : "by source position; click to remove";
    const onToggle = (edge) => {
      request({ action: "toggle_attention_edges", panel: node.panel, edges: [edge] });
    };
    const named = Object.entries(effects).filter(([edge]) => edge !== "all")
      .map(([edge, targets]) => [edgeName(edge.split(",")), targets[target]]);
    parts.append(make("div", { class: "rows" },
      make("h5", {}, `Attention of layer ${node.level - 1}`, make("small", {}, subtitle)),
      heatMap({ node, quantity, target, effects, before, onToggle, onHover }),
      effectList(named, before, quantity)));
  }
  parts.append(make("div", { class: "lens" },
    make("h5", {}, "Would predict", make("small", {}, "logit lens: as if this were the last layer")),
    tokenTable(node.tokens, LENS_COLUMNS)));
  const where = `${place}, position ${node.column} \u201c${node.text}\u201d`;
  return card({ class: "card node" }, panel.name, where, parts);
}
