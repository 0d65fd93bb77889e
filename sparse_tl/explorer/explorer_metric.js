// The choice of the quantity that effects change.

const METRIC_LABELS = {
  log_probability: "log-probability", logit_difference: "token A \u2212 token B", answer_logit: "raw logit",
};

// Draws a choice of the metric and, where it compares two tokens, a field for the second one, which
// offers the likely tokens of the first panel, and its runner-up where nothing is typed.
function drawMetric(place, model, target, request) {
  const chosen = model.get("_metric");
  const [{ quantity, outputs }] = model.get("_panels");
  const [runnerUp, known] = [quantity.wrong[target], outputs[target].map(({ text }) => text)];
  const id = `${model.get("_saved_id")}-tokens`;
  const shown = JSON.stringify([chosen, runnerUp, known]);
  if (place.dataset.shown === shown) return; // somebody may be typing
  place.dataset.shown = shown;
  const focused = place.contains(document.activeElement) ? document.activeElement.name : "";
  const ask = (metric, wrong) => request({ action: "metric", metric, wrong });
  const select = make("select", { name: "metric", onchange: () => ask(select.value, chosen.wrong) },
    ...chosen.offered.map((name) => new Option(METRIC_LABELS[name] ?? name, name)));
  select.value = chosen.name;
  place.replaceChildren(make("label", {}, "Effects on", select));
  if (chosen.name === "logit_difference") {
    const field = make("input", {
      name: "wrong", type: "text", list: id, size: 10, autocomplete: "off", spellcheck: "false",
      value: chosen.wrong, placeholder: runnerUp,
      title: "token B, with the space that it begins with; empty: the model\u2019s runner-up",
      onchange: () => ask(chosen.name, field.value),
    });
    // Jupyter has keys of its own, which must not work while somebody types.
    field.addEventListener("keydown", (event) => event.stopPropagation());
    const options = known.map((text) => make("option", { value: text }));
    place.append(make("label", {}, "B", field), make("datalist", { id }, ...options));
  }
  place.querySelector(`[name="${focused}"]`)?.focus({ preventScroll: true });
}
