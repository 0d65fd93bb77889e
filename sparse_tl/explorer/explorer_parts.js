// The cards beside the diagram: output tokens, heads, what is removed, and what a node attends to.
// Each function makes the content of a card from the numbers that the kernel sent.

// An element with attributes, or with listeners where the name starts with "on", and children.
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, String(value));
  }
  element.append(...children);
  return element;
}

function signed(number, digits) {
  const text = Math.abs(number).toFixed(digits);
  if (Number(text) === 0) return text;
  return (number < 0 ? "\u2212" : "+") + text;
}

function plain(number, digits) {
  return number.toFixed(digits).replace("-", "\u2212");
}

function percent(share) {
  if (share > 0 && share < 0.0005) return "<0.1 %";
  return `${(100 * share).toFixed(1)} %`;
}

const headName = (layer, head) => `a${layer}.h${head}`;
const edgeName = ([layer, head, query, key]) => `${headName(layer, head)} ${key}\u2192${query}`;

// As in the diagram: blue, or orange below 0, darker with the size of a share in -1..1.
function shade(share) {
  const t = Math.min(1, Math.abs(share)) ** 0.6;
  const [light, dark] = share < 0 ? [[254, 249, 246], [168, 62, 14]] : [[247, 250, 254], [8, 48, 122]];
  const mixed = light.map((from, i) => Math.round(from + (dark[i] - from) * t));
  return { ground: `rgb(${mixed.join(", ")})`, ink: t > 0.5 ? "#ffffff" : "#16181d" };
}

// One line of what the removals do to a panel's prediction.
function outcome(name, rows) {
  const best = rows.reduce((a, b) => (b.before[0] > a.before[0] ? b : a));
  const delta = best.after[0] - best.before[0];
  const change = Math.abs(delta) < 0.005 ? "" : make(
    "span", { class: delta < 0 ? "less" : "more" }, ` (${signed(delta, 2)})`,
  );
  const other = rows[0].text === best.text ? "" : make(
    "span", { class: "less" }, " now predicts ", make("span", { class: "token" }, rows[0].text),
  );
  return make("span", { class: "outcome", "data-outcome": name },
    make("b", {}, name), make("span", { class: "token" }, best.text),
    make("span", {}, `logit ${plain(best.after[0], 2)}`, change), other);
}

// The likely tokens of one predicted column, with nothing removed and now.
function outputTable(rows, changed) {
  const line = ({ text, before, after }, rank) => {
    const delta = after[0] - before[0];
    const cells = [
      make("th", { scope: "row" }, make("span", { class: "token" }, text)),
      make("td", {}, plain(before[0], 2)),
      make("td", {}, plain(after[0], 2)),
      make("td", { class: delta < -0.005 ? "less" : delta > 0.005 ? "more" : "same" },
        changed ? signed(delta, 2) : ""),
      shareCell(after[1]),
    ];
    return make("tr", { class: rank === 0 ? "first" : null, "data-token": text }, ...cells);
  };
  const heads = ["token", "logit before", "now", "change", "probability"];
  return make("table", { class: "outputs" },
    make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)))),
    make("tbody", {}, ...rows.map(line)),
  );
}

function shareCell(share) {
  const bar = make("span", { class: "bar" });
  bar.style.width = `${(100 * share).toFixed(1)}%`;
  return make("td", { class: "share" }, bar, make("span", {}, percent(share)));
}

// A grid of layers and heads, darker with what removing a head does to the predicted logit.
function headGrid({ effects, removed, nLayers, nHeads, onToggle, onHover }) {
  const largest = Math.max(1e-9, ...effects.flat().map(Math.abs));
  const grid = make("div", { class: "heads", role: "group", "aria-label": "heads" });
  grid.style.setProperty("--heads", nHeads);
  const gone = new Set(removed.map(String));
  for (let layer = nLayers - 1; layer >= 0; layer--) {
    grid.append(make("span", { class: "axis" }, `${layer}`));
    for (let head = 0; head < nHeads; head++) {
      const off = gone.has(`${layer},${head}`);
      const effect = effects[layer][head];
      const { ground } = shade(-effect / largest);
      const words = off ? ["removed; click: put it back"] : [
        `effect of removing it: ${signed(effect, 2)} on the predicted logit`, "click: remove it",
      ];
      const cell = make("button", {
        type: "button", class: "cell", "data-head": `${layer},${head}`, "aria-pressed": String(off),
        "aria-label": `${headName(layer, head)}${off ? ", removed" : ""}`,
        onclick: () => onToggle(layer, head),
        onpointermove: (event) => onHover([headName(layer, head), ...words], event),
      });
      if (!off) cell.style.background = ground;
      grid.append(cell);
    }
  }
  grid.append(make("span", {}));
  for (let head = 0; head < nHeads; head++) {
    grid.append(make("span", { class: "axis" }, `${head}`));
  }
  return make("div", { class: "scroll" }, grid);
}

// Heads and edges that are removed from a panel; each has a button that puts it back.
function chips({ heads, edges, onHead, onEdge }) {
  const MOST = 16;
  const all = [
    ...heads.map(([layer, head]) => [headName(layer, head), () => onHead(layer, head)]),
    ...edges.map((edge) => [edgeName(edge), () => onEdge(edge)]),
  ];
  const shown = all.slice(0, MOST).map(([name, restore]) =>
    make("span", { class: "chip", "data-chip": name }, name,
      make("button", { type: "button", "aria-label": `put back ${name}`, onclick: restore }, "\u00d7")),
  );
  if (all.length > MOST) shown.push(make("span", { class: "more-chips" }, `and ${all.length - MOST} more`));
  return make("div", { class: "chips" }, ...shown);
}

// Attention from every head of a layer into one node, by source column.
function heatMap({ node, onToggle, onHover }) {
  const { level, column, keys, attention, removed } = node;
  const layer = level - 1;
  const grid = make("div", { class: "heat", role: "group", "aria-label": "attention into the node" });
  grid.style.setProperty("--keys", keys.length);
  attention.forEach((row, head) => {
    grid.append(make("span", { class: "axis" }, headName(layer, head)));
    row.forEach((weight, i) => {
      const off = removed[head][i];
      const { key, text } = keys[i];
      const { ground, ink } = shade(weight);
      const name = edgeName([layer, head, column, key]);
      const words = [
        `from position ${key}: \u201c${text}\u201d`,
        off ? "removed; click: put it back" : `attention ${weight.toFixed(3)}; click: remove it`,
      ];
      const cell = make("button", {
        type: "button", class: "cell", "aria-pressed": String(off),
        "data-edge": [layer, head, column, key].join(","),
        "aria-label": `${name}, ${off ? "removed" : `attention ${weight.toFixed(3)}`}`,
        onclick: () => onToggle([layer, head, column, key]),
        onpointermove: (event) => onHover([name, ...words], event),
      });
      if (!off) {
        cell.style.background = ground;
        cell.style.color = ink;
        cell.textContent = weight >= 0.005 ? weight.toFixed(2).replace(/^0/, "") : "";
      }
      grid.append(cell);
    });
  });
  grid.append(make("span", {}));
  for (const { key, text } of keys) {
    grid.append(make("span", { class: "axis key", title: `position ${key}` }, text));
  }
  return make("div", { class: "scroll" }, grid);
}

// What the logit lens reads at one node.
function lensTable(tokens) {
  const line = ({ text, after }) => make("tr", { "data-token": text },
    make("th", { scope: "row" }, make("span", { class: "token" }, text)),
    make("td", {}, plain(after[0], 2)), shareCell(after[1]));
  const heads = ["token", "logit", "probability"];
  return make("table", { class: "outputs" },
    make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)))),
    make("tbody", {}, ...tokens.map(line)));
}
