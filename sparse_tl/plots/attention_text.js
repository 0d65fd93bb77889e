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

function threeDigits(value) {
  const digits = { minimumSignificantDigits: 3, maximumSignificantDigits: 3 };
  return value.toLocaleString("en-US", digits).replace("-", "\u2212");
}

// What removing an edge changes, below 0 where it lowers what is measured, with three digits; or what
// that is within, where it was too small to be sent.
function changeText(panel, kind, place, data, { target }) {
  const { rows, scales } = panel.scores[kind];
  const told = edgeAt(panel, rows[target], place)?.told;
  const steps = told ?? 0.5 - data.floors[kind];
  const value = (-steps / data.steps) * scales[target];
  const within = told === undefined && value ? "within \u00b1" : "";
  return within + (value ? threeDigits(value) : "0");
}

// "effect" where the effect of an edge is known exactly, or else, where there is one, its estimate.
function knownScore(panel, place, { target }) {
  const { scores } = panel;
  const row = scores.effect?.rows[target];
  const isExact = row && (!row.exact || edgeAt(panel, row, place)?.estimated === false);
  return isExact ? "effect" : scores["first-order"] ? "first-order" : null;
}

// A token in quotation marks; one with letters written from right to left is isolated, so that it
// leaves the words around it where they are.
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;
function quoted(token) {
  return RIGHT_TO_LEFT.test(token) ? `\u201c\u2068${token}\u2069\u201d` : `\u201c${token}\u201d`;
}

function attentionText(panel, place, data) {
  const told = edgeAt(panel, panel.attention, place)?.told;
  const bound = (data.floors.attention - 0.5) / data.steps;
  return `attention ${told === undefined ? `at most ${bound}` : (told / data.steps).toFixed(3)}`;
}

function carriedText(panel, place, data) {
  const percent = (steps) => (steps / data.steps) * panel.mostCarried * 100;
  const edge = edgeAt(panel, panel.carried, place);
  const bound = Math.ceil(10 * percent(data.floors.carried - 0.5)) / 10;
  const share = !edge ? `at most ${bound.toFixed(1)}` :
    percent(edge.told) < 0.05 ? "less than 0.1" : percent(edge.told).toFixed(1);
  return `writes ${share}\u202f% of the residual stream there`;
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
  const text = [
    `Layer ${line.layer}, head ${line.head}`,
    ...tokenText(panel, line.key, "from position"),
    ...tokenText(panel, line.query, "to position"),
    `${attentionText(panel, line.place, data)}, gate open`,
  ];
  if (panel.carried) text.push(carriedText(panel, line.place, data));
  const measured = `${panel.quantity.unit} on ${quantityText(panel.quantity, state.target)}`.trim();
  const told = (kind) => `${changeText(panel, kind, line.place, data, state)} ${measured}`;
  if (knownScore(panel, line.place, state) === "effect") text.push(`effect of removing it ${told("effect")}`);
  if (panel.scores["first-order"]) text.push(`first-order attribution ${told("first-order")}`);
  text.push(...weakerTexts(panel, line, data, state));
  const all = line.others.length ? " in all these heads" : "";
  return live.onEdges ? [...text, `click: remove this edge${all}`] : text;
}

// The edge in other heads, from the strongest on: whichever is drawn, another may matter more.
function weakerTexts(panel, line, data, state) {
  const MOST = 5;
  const [, , n] = panel.shape;
  const list = weightsOf(panel, shownWeight(panel, state), state.target);
  const edges = line.others.map((head) => edgeAt(panel, list, line.place + (head - line.head) * n * n));
  edges.sort((a, b) => Math.abs(b.told) - Math.abs(a.told));
  const said = edges.slice(0, MOST).map(({ head, place }) => {
    const kind = knownScore(panel, place, state);
    const score = kind && `, ${kind} ${changeText(panel, kind, place, data, state)}`;
    return `also head ${head}: ${attentionText(panel, place, data)}${score ?? ""}`;
  });
  return edges.length > MOST ? [...said, `and ${edges.length - MOST} more heads`] : said;
}

function removedText(panel, line) {
  return [
    `Removed: layer ${line.layer}, head${line.heads.length > 1 ? "s" : ""} ${line.heads.join(", ")}`,
    ...tokenText(panel, line.key, "from position"),
    ...tokenText(panel, line.query, "to position"),
    "click: restore",
  ];
}
