// A component diagram of attribution graphs whose cards scale nodes: the kernel runs the model with
// the factors in `_factors`, by panel and node, and answers with a sentence per panel in `_effects`.

function render({ model, el }) {
  const root = emptyFigure(), data = JSON.parse(model.get("_figure"));
  const effects = make("div", { class: "effects", role: "status" });
  const show = () => {
    const texts = model.get("_effects"), shown = root.querySelector(".scale output");
    effects.replaceChildren(...texts.map((text) => make("p", {}, text)));
    shown?.replaceChildren(texts[shown.dataset.panel]);
  };
  const send = (factors) => {
    model.set("_factors", factors);
    model.save_changes();
  };

  // A field for what the nodes of a card are multiplied by, and a button that ablates them.
  data.live = (panel, names) => {
    const now = () => model.get("_factors").map((factors) => ({ ...factors }));
    const scale = (factor) => {
      const factors = now();
      for (const name of names) {
        if (factor === 1) delete factors[panel][name];
        else factors[panel][name] = factor;
      }
      input.value = factor;
      send(factors);
    };
    const input = make("input", { type: "number", name: "factor", step: "any",
      value: now()[panel][names[0]] ?? 1, onchange: () => scale(input.value === "" ? 1 : Number(input.value)) });
    return make("p", { class: "scale" }, make("label", {}, "multiplied by ", input), " ",
      make("button", { type: "button", name: "ablate", onclick: () => scale(0) }, "Ablate"), " ",
      make("button", { type: "button", name: "restore", onclick: () => scale(1) }, "Restore"),
      make("output", { "data-panel": panel }, model.get("_effects")[panel]));
  };
  el.replaceChildren(make("div", { class: "sparse-tl-auto" }, effects, root));  // dark where the notebook is
  start(root, data);
  show();
  model.on("change:_effects", show);
  return () => model.off("change:_effects", show);
}

export default { render };
