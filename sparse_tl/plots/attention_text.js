// What a circuit diagram says: captions, and tooltips of lines of text, the first the heading.

function captionText(panel, view, data, state) {
  const measured = quantityText(panel.quantity, state.target);
  const scoreNames = {
    carried: "share carried", effect: `effect on ${measured}`,
    "first-order": `first-order attribution of ${measured}`,
  };
  const number = (value) => value.toLocaleString("en-US");
  const kind = shownWeight(panel, state);
  const name = scoreNames[kind];
  // Also of edges that are not shown: the effects of some may be larger than their estimates.
  const { nEstimated } = panel;
  const estimates = kind === "effect" && nEstimated ? `; ${number(nEstimated)} are estimated` : "";
  const share = name ? ` of the largest ${name}` : "";
  return `${number(view.count)} of ${number(view.total)} attention edges \u2265 ` +
    thresholdText(data, state) + share + estimates + panel.mlps;
}

function thresholdText(data, state) {
  return (state.limit / data.steps).toFixed(state.limit % 10 ? 3 : 2);
}

// What effects change at a target: a metric of the answer, and of the wrong one.
function quantityText({ metric, answers, wrong }, target) {
  const [answer, other] = [answers, wrong].map((texts) => texts.length ? quoted(texts[target]) : "");
  const logit = answer ? `logit ${answer}` : "the logit";
  if (metric === "log_probability") return `log P(${answer})`;
  if (metric === "logit_difference") return `${logit} \u2212 logit ${other}`;
  return metric === "answer_logit" ? logit : metric.replaceAll("_", " ");
}

// A change and its unit; below 0 where removing the edge lowers what is measured.
function edgeEffectText(panel, kind, place, data, state) {
  const [row, scale] = [panel.scores[kind].rows, panel.scores[kind].scales].map((x) => x[state.target]);
  const share = weightAt(panel, row, place, data.floors[kind]);
  const steps = share ?? data.floors[kind];
  const value = ((-steps / data.steps) * scale).toFixed(3).replace("-", "\u2212");
  const said = share === null ? `within \u00b1${value.replace("\u2212", "")}` : value;
  const unit = panel.quantity.unit ? ` ${panel.quantity.unit}` : "";
  return `${said}${unit} on ${quantityText(panel.quantity, state.target)}`;
}

// A token in quotation marks; one with letters written from right to left is isolated, so that it
// leaves the words around it where they are.
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;
function quoted(token) {
  return RIGHT_TO_LEFT.test(token) ? `\u201c\u2068${token}\u2069\u201d` : `\u201c${token}\u201d`;
}

function carriedText(panel, place, data) {
  const percent = (steps) => `${((steps / data.steps) * panel.mostCarried * 100).toFixed(1)}\u202f%`;
  const floor = data.floors.carried;
  const steps = weightAt(panel, panel.carried, place, floor);
  const share = steps === null ? `below ${percent(floor)}` : percent(steps);
  return `writes ${share} of the residual stream there`;
}

function nodeText(panel, level, column, live) {
  const place = level === 0 ? "Input" : `After layer ${level - 1}`;
  const hint = live.onEdges ? ["click: what it attends to and predicts"] : [];
  return [place, ...tokenText(panel, column, "position"), ...hint];
}

function tokenText(panel, column, label) {
  const known = panel.input[column] === panel.output[column];
  const output = known ? "" : `, output ${quoted(panel.output[column])}`;
  return [`${label} ${column}: ${quoted(panel.input[column])}${output}`];
}

function edgeText(panel, line, data, state, live) {
  const floor = data.floors.attention;
  const attention = weightAt(panel, panel.attention, line.place, floor);
  const share = attention === null ? `below ${floor / data.steps}` : (attention / data.steps).toFixed(3);
  const text = [
    `Layer ${line.layer}, head ${line.head}`,
    ...tokenText(panel, line.key, "from position"),
    ...tokenText(panel, line.query, "to position"),
    `attention ${share}, gate open`,
  ];
  if (panel.carried) text.push(carriedText(panel, line.place, data));
  const { effect, "first-order": estimate } = panel.scores;
  const told = (kind) => edgeEffectText(panel, kind, line.place, data, state);
  const row = effect?.rows[state.target];
  const isKnown = row && (!row.exact || edgeAt(panel, row, line.place)?.estimated === false);
  if (isKnown) text.push(`effect of removing it ${told("effect")}`);
  if (estimate) text.push(`first-order attribution ${told("first-order")}`);
  if (line.others.length) {
    const heads = line.others.sort((a, b) => a - b).join(", ");
    text.push(`weaker here: head${line.others.length > 1 ? "s" : ""} ${heads}`);
  }
  const all = line.others.length ? " in all these heads" : "";
  return live.onEdges ? [...text, `click: remove this edge${all}`] : text;
}

function removedText(panel, line) {
  return [
    `Removed: layer ${line.layer}, head${line.heads.length > 1 ? "s" : ""} ${line.heads.join(", ")}`,
    ...tokenText(panel, line.key, "from position"),
    ...tokenText(panel, line.query, "to position"),
    "click: restore",
  ];
}
