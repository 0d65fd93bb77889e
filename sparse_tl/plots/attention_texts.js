// What a circuit diagram says: its captions, and tooltips of lines of text, the first the heading.

function captionText(panel, view, data, state) {
  const scoreNames = { effect: "effect", "first-order": "first-order attribution" };
  const number = (value) => value.toLocaleString("en-US");
  const name = scoreNames[shownWeight(panel, state)];
  const share = name ? ` of the largest ${name}; orange: hurts` : "";
  return `${number(view.count)} of ${number(view.total)} attention edges \u2265 ` +
    thresholdText(data, state) + share;
}

function thresholdText(data, state) {
  return (state.limit / data.steps).toFixed(state.limit % 10 ? 3 : 2);
}

// In logits; below 0 where removing the edge lowers the predicted logit.
function logitsOf(panel, kind, index, data, state) {
  const { rows, scales } = panel.scores[kind];
  const change = (-rows[state.target][index] / data.steps) * scales[state.target];
  return `${change.toFixed(3).replace("-", "\u2212")} logits`;
}

function nodeText(panel, level, column, live) {
  const place = level === 0 ? "Input" : `After layer ${level - 1}`;
  const hint = live.onEdges ? ["click: what it attends to and predicts"] : [];
  return [place, ...tokenText(panel, column, "position"), ...hint];
}

function tokenText(panel, column, label) {
  const known = panel.input[column] === panel.output[column];
  const output = known ? "" : `, output \u201c${panel.output[column]}\u201d`;
  return [`${label} ${column}: \u201c${panel.input[column]}\u201d${output}`];
}

function edgeText(panel, line, data, state, live) {
  const attention = panel.attention[line.index] / data.steps;
  const text = [
    `Layer ${line.layer}, head ${line.head}`,
    ...tokenText(panel, line.key, "from position"),
    ...tokenText(panel, line.query, "to position"),
    `attention ${attention.toFixed(3)}, gate open`,
  ];
  const { effect, "first-order": estimate } = panel.scores;
  const logits = (kind) => logitsOf(panel, kind, line.index, data, state);
  if (effect) text.push(`effect of removing it ${logits("effect")}`);
  if (estimate) text.push(`first-order attribution ${logits("first-order")}`);
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
