// The choice of the metric on which effects are shown.

const METRIC_LABELS = {
  log_probability: "log-probability", logit_difference: "token A \u2212 token B", answer_logit: "raw logit",
};

// Draws the choice and, if the metric compares two tokens, a field for the second. The field suggests
// the first panel's likely tokens; if it is empty, the second token is the runner-up.
function drawMetric(container, model, target, request) {
  const chosen = model.get("_metric");
  const [{ quantity, outputs }] = model.get("_panels");
  const [runnerUp, known] = [quantity.wrong[target], outputs[target].map(({ text }) => text)];
  const id = `${model.get("_saved_id")}-tokens`;
  const shown = JSON.stringify([chosen, runnerUp, known]);
  if (container.dataset.shown === shown) return; // the reader may be typing
  container.dataset.shown = shown;
  const focused = container.contains(document.activeElement) ? document.activeElement.name : "";
  const ask = (metric, wrong) => request({ action: "choose_metric", metric, wrong });
  const select = make("select", { name: "metric", onchange: () => ask(select.value, chosen.wrong) },
    ...chosen.offered.map((name) => new Option(METRIC_LABELS[name] ?? name, name)));
  select.value = chosen.name;
  container.replaceChildren(make("label", {}, "Effects on", select));
  if (chosen.name === "logit_difference") {
    const field = make("input", {
      name: "wrong", type: "text", list: id, size: 10, autocomplete: "off", spellcheck: "false",
      value: chosen.wrong, placeholder: runnerUp,
      title: "token B, including any leading space; if empty, the model\u2019s runner-up",
      onchange: () => ask(chosen.name, field.value),
    });
    // Jupyter's keyboard shortcuts must not act while the reader types.
    field.addEventListener("keydown", (event) => event.stopPropagation());
    const options = known.map((text) => make("option", { value: text }));
    container.append(make("label", {}, "B", field), make("datalist", { id }, ...options));
  }
  container.querySelector(`[name="${focused}"]`)?.focus({ preventScroll: true });
}
