// The texts of a circuit diagram: captions, and tooltips as lines of text under a heading.

function captionText(panel, view, data, state) {
  const measured = quantityText(panel.quantity, state.target);
  const scoreNames = {
    carried: "share carried", effect: `effect on ${measured}`,
    "first-order": `first-order attribution of ${measured}`,
  };
  const number = (value) => value.toLocaleString("en-US");
  const kind = shownWeight(panel, state);
  const name = scoreNames[kind];
  // Includes edges that are not shown, whose effects may be larger than their estimates.
  const { nEstimated } = panel;
  const estimates = kind === "effect" && nEstimated ? `; ${number(nEstimated)} are estimated` : "";
  const share = name ? ` of the largest ${name}` : "";
  // Edges of a sparse model carry more each, so that more of them can reach the threshold.
  const carried = (view.sum / data.steps) * panel.weights.carried?.scales[0] / panel.totalCarried;
  const together = kind === "carried" ? `, ${Math.round(100 * carried)}\u202f% of all carried` : "";
  const mlps = panel.nMlps === null ? "" :
    `; ${number(panel.mlps.length)} of ${number(panel.nMlps)} MLPs open`;
  return `${number(view.open)} of ${number(view.total)} attention edges open; drawn: ` +
    `${number(view.count)} ${kind === "attention" ? "with attention " : ""}\u2265 ` + thresholdText(data, state) + share + together + estimates + mlps;
}

function thresholdText(data, state) {
  return (state.limit / data.steps).toFixed(state.limit % 10 ? 3 : 2);
}

// The quantity that effects change at a target: a metric of the answer and of any wrong answer.
function quantityText({ metric, answers, wrong }, target) {
  const [answer, other] = [answers, wrong].map((texts) => texts.length ? quoted(texts[target]) : "");
  const logit = answer ? `logit ${answer}` : "the logit";
  if (metric === "log_probability") return `log P(${answer})`;
  if (metric === "logit_difference") return `${logit} \u2212 logit ${other}`;
  return metric === "answer_logit" ? logit : metric.replaceAll("_", " ");
}

function threeDigits(value, signDisplay = "negative") {
  const digits = { minimumSignificantDigits: 3, maximumSignificantDigits: 3, signDisplay };
  return value ? value.toLocaleString("en-US", digits).replace("-", "\u2212") : "0";
}

// The change of the metric when an edge is removed, with three digits; or a bound on it, if it was too
// small to be sent.
function changeText(panel, kind, index, data, { target }) {
  const { rows, scales } = panel.weights[kind];
  const unrounded = edgeAt(panel, rows[target], index)?.unrounded;
  const steps = unrounded ?? 0.5 - data.floors[kind];
  const value = (-steps / data.steps) * scales[target];
  const within = unrounded === undefined && value ? "within \u00b1" : "";
  return within + threeDigits(value);
}

// "effect" if the exact effect of an edge is known; otherwise its estimate, if there is one.
function knownScore(panel, index, { target }) {
  const row = weightsOf(panel, "effect", target);
  const isExact = row && (!row.exact || edgeAt(panel, row, index)?.estimated === false);
  return isExact ? "effect" : panel.weights["first-order"] ? "first-order" : null;
}

// A token in quotation marks; a right-to-left token is isolated, so that it does not reorder the
// words around it.
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;
function quoted(token) {
  return RIGHT_TO_LEFT.test(token) ? `\u201c\u2068${token}\u2069\u201d` : `\u201c${token}\u201d`;
}

function attentionText(panel, index, data) {
  const steps = edgeAt(panel, weightsOf(panel, "attention"), index)?.unrounded;
  const bound = (data.floors.attention - 0.5) / data.steps;
  return `attention ${steps === undefined ? `at most ${bound}` : (steps / data.steps).toFixed(3)}`;
}

function carriedText(panel, index, data) {
  const percent = (steps) => (steps / data.steps) * panel.weights.carried.scales[0] * 100;
  const edge = edgeAt(panel, weightsOf(panel, "carried"), index);
  const bound = Math.ceil(10 * percent(data.floors.carried - 0.5)) / 10;
  const share = !edge ? `at most ${bound.toFixed(1)}` :
    percent(edge.unrounded) < 0.05 ? "less than 0.1" : percent(edge.unrounded).toFixed(1);
  return `writes ${share}\u202f% of the residual stream there`;
}

function nodeText(panel, level, column, live) {
  const title = level === 0 ? "Input" : `After layer ${level - 1}`;
  const hint = live.onEdges ? ["click to see its attention and predictions"] : [];
  return [title, ...tokenText(panel, column, "position"), ...hint];
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
    `${attentionText(panel, line.index, data)}, gate open`,
  ];
  if (panel.weights.carried) text.push(carriedText(panel, line.index, data));
  const measured = `${panel.quantity.unit} on ${quantityText(panel.quantity, state.target)}`.trim();
  const change = (kind) => `${changeText(panel, kind, line.index, data, state)} ${measured}`;
  if (knownScore(panel, line.index, state) === "effect") text.push(`effect of removing it ${change("effect")}`);
  if (panel.weights["first-order"]) text.push(`first-order attribution ${change("first-order")}`);
  text.push(...weakerTexts(panel, line, data, state));
  const all = line.others.length ? " in all these heads" : "";
  return live.onEdges ? [...text, `click to remove this edge${all}`] : text;
}

// The edge in other heads, strongest first: another may matter more than the one that is drawn.
function weakerTexts(panel, line, data, state) {
  const MOST = 5;
  const [, , n] = panel.shape;
  const list = weightsOf(panel, shownWeight(panel, state), state.target);
  const edges = line.others.map((head) => edgeAt(panel, list, line.index + (head - line.head) * n * n));
  edges.sort((a, b) => Math.abs(b.unrounded) - Math.abs(a.unrounded));
  const texts = edges.slice(0, MOST).map(({ head, index }) => {
    const kind = knownScore(panel, index, state);
    const score = kind && `, ${kind} ${changeText(panel, kind, index, data, state)}`;
    return `also head ${head}: ${attentionText(panel, index, data)}${score ?? ""}`;
  });
  return edges.length > MOST ? [...texts, `and ${edges.length - MOST} more heads`] : texts;
}

function removedText(panel, line) {
  return [
    `Removed: layer ${line.layer}, head${line.heads.length > 1 ? "s" : ""} ${line.heads.join(", ")}`,
    ...tokenText(panel, line.key, "from position"),
    ...tokenText(panel, line.query, "to position"),
    "click to restore it",
  ];
}
