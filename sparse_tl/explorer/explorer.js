// The live circuit explorer: the interactive diagram, cards beside it, and messages to the kernel,
// which removes and restores parts and sends all numbers anew. The diagram's own script is in
// circuit_diagram.js, the cards are in explorer_parts.js, the kernel and the page in explorer_page.js.

const NO_KERNEL = "This is a saved view without a kernel: run the cell to use it.";
const RESTARTED = "The kernel was restarted: run the cell again. This view is no longer connected; " +
  "only the diagram itself still works.";

function render({ model, el }) {
  const root = make("div", { class: "sparse-tl-explorer" });
  const tip = make("div", { class: "tip", role: "tooltip", hidden: true });
  const message = make("div", { class: "message", role: "alert", hidden: true });
  const top = make("div", { class: "top" });
  const summary = make("div", { class: "summary" });
  const diagram = make("div", { class: "diagram" });
  const side = make("div", { class: "side" });
  // The first of its class: the diagram has a tooltip of its own.
  const head = make("div", { class: "head" }, top, message, summary);
  root.append(tip, head, make("div", { class: "columns" }, diagram, side));
  el.replaceChildren(root);

  let state = null; // of the diagram: target, weight, limit, head, focus
  let settling = null;
  let choosing = null;
  let patience = null;
  const kernel = connect(model, onKernel);

  // ---- the kernel ----------------------------------------------------------------------------

  function request(content) {
    tellChoices();
    kernel.request(content);
  }

  // Effects are computed while nobody waits for anything else.
  function onKernel({ busy, waited, more, isFree }) {
    clearTimeout(patience);
    root.toggleAttribute("data-busy", busy);
    const status = top.querySelector(".status");
    const words = busy ? "computing \u2026" : more ? progressText(model) : "";
    // The kernel may be at work in another cell, or gone: only a restart is told to widgets.
    status.textContent = waited < 3000 ? words : waited < 10000 ? "waiting for the kernel \u2026" :
      "no answer: the kernel is busy, or was restarted (then run the cell again)";
    if (waited || busy) patience = setTimeout(kernel.report, 1000);
    if (more && isFree) kernel.askEffects();
  }

  // A while after the last change, what is saved with the notebook is brought up to date.
  function settleLater() {
    clearTimeout(settling);
    settling = setTimeout(() => kernel.tell({ action: "settle" }), 700);
  }

  // What Python should know of the reader's choices, before it computes or saves anything.
  function tellChoices() {
    if (choosing === null) return;
    clearTimeout(choosing);
    choosing = null;
    const threshold = state.limit / figureData(model).steps;
    kernel.tell({ action: "choose", target: state.target, weight: state.weight, threshold });
    if (state.weight === "effect") kernel.askEffects(); // its lines have some, too
    settleLater();
  }

  // Without a kernel nothing can be recomputed; the diagram itself still works.
  function die(words) {
    kernel.close();
    clearTimeout(settling);
    clearTimeout(choosing);
    root.setAttribute("data-dead", "");
    drawSide();
    showMessage({ kind: "error", text: words });
  }

  function showMessage(content) {
    message.hidden = !content;
    if (!content) return;
    const close = make("button", {
      type: "button", "aria-label": "close", onclick: closeMessage,
    }, "\u00d7");
    message.className = `message ${content.kind}`;
    message.replaceChildren(make("span", {}, content.text), close);
  }

  // Python is told, so that the same words can come again.
  function closeMessage() {
    message.hidden = true;
    kernel.tell({ action: "read" });
  }

  // ---- drawing -------------------------------------------------------------------------------

  function drawTop() {
    const input = make("input", {
      name: "prompt", type: "text", autocomplete: "off", spellcheck: "false",
      value: model.get("_prompt"),
    });
    const form = make("form", {
      onsubmit: (event) => {
        event.preventDefault();
        request({ action: "prompt", prompt: input.value });
      },
    }, make("label", {}, "Prompt", input), make("button", { type: "submit" }, "Run"));
    // Jupyter has keys of its own, which must not work while somebody types.
    form.addEventListener("keydown", (event) => event.stopPropagation());
    const restore = make("button", {
      type: "button", class: "restore", onclick: () => request({ action: "restore" }),
    }, "Restore all");
    top.replaceChildren(form, make("span", { class: "position" }), make("span", { class: "metric" }),
      restore, make("span", { class: "status", "aria-live": "polite" }));
  }

  // A choice of columns where the prompt has more than the diagram predicts.
  function drawPositions() {
    const known = figureData(model).targets.map(([column]) => column);
    const all = model.get("_positions");
    const other = all.filter((column) => !known.includes(column));
    const select = make("select", {
      name: "position",
      onchange: () => request({ action: "position", column: Number(select.value) }),
    }, new Option("another \u2026", ""), ...other.map((column) => new Option(`position ${column}`, column)));
    const label = other.length ? [make("label", {}, "Predict", select)] : [];
    top.querySelector(".position").replaceChildren(...label);
  }

  function drawDiagram() {
    const { svg } = model.get("_figure"), data = figureData(model);
    const figure = make("div", { class: "sparse-tl-circuit", "data-ready": true });
    figure.innerHTML = '<div class="controls"></div><div class="canvas"></div>' +
      '<div class="tip" role="tooltip" hidden></div>';
    figure.querySelector(".canvas").innerHTML = svg;
    const [focused, scrolled] = [describeFocus(), diagram.querySelector(".canvas")?.scrollLeft];
    if (state) state = { ...state, ...choicesIn(data) };
    diagram.replaceChildren(figure);
    start(figure, data, {
      state,
      removed: model.get("_panels").map((panel) => removedLines(panel.removedEdges)),
      onState,
      onEdges: (panel, edges) => request({ action: "edges", panel, edges }),
    });
    if (scrolled !== undefined) figure.querySelector(".canvas").scrollLeft = scrolled;
    drawPositions();
    if (focused) diagram.querySelector(focused)?.focus({ preventScroll: true });
  }

  // The reader's choices as far as a new figure has them.
  function choicesIn(data) {
    const target = Math.min(state.target, data.targets.length - 1);
    const node = model.get("_node");
    const focus = node && { panel: node.panel, level: node.level, column: node.column };
    return { target, limit: Math.max(state.limit, data.floors[state.weight]), focus };
  }

  // A selector of the element of the diagram that has the keyboard's focus.
  function describeFocus() {
    const active = document.activeElement;
    if (!active || !diagram.contains(active)) return null;
    if (active.name) return `[name="${active.name}"]`;
    const { level, column } = active.dataset;
    const panel = active.closest("g[data-panel]")?.dataset.panel;
    return level && `g[data-panel="${panel}"] circle[data-level="${level}"][data-column="${column}"]`;
  }

  // Likewise of the cell of a card.
  function describeCell() {
    const { head, edge } = document.activeElement?.dataset ?? {};
    if (!side.contains(document.activeElement)) return null;
    if (edge) return `[data-edge="${edge}"]`;
    const panel = document.activeElement.closest(".card")?.dataset.panel;
    return head && `.card[data-panel="${panel}"] [data-head="${head}"]`;
  }

  function removedLines(edges) {
    const lines = new Map();
    for (const [layer, head, query, key] of edges) {
      const place = [layer, query, key].join();
      if (!lines.has(place)) lines.set(place, { layer, query, key, heads: [] });
      lines.get(place).heads.push(head);
    }
    return [...lines.values()];
  }

  function onState(now) {
    const before = state;
    state = { ...now };
    if (!before) return;
    if (before.target !== now.target) drawSide();
    if (JSON.stringify(before.focus) !== JSON.stringify(now.focus)) {
      kernel.request(now.focus ? { action: "node", ...now.focus } : { action: "close" });
      return;
    }
    clearTimeout(choosing);
    choosing = setTimeout(tellChoices, 200);
  }

  // The diagram marks the node of the card, also where Python chose it.
  function onNode() {
    const node = model.get("_node");
    const { panel, level, column } = state.focus ?? {};
    if (node && (node.panel !== panel || node.level !== level || node.column !== column)) {
      drawDiagram();
    }
    drawSide();
  }

  function drawSide() {
    hideTip();
    const focused = describeCell();
    const panels = model.get("_panels");
    summary.replaceChildren(...panels.map((panel) => outcome(panel, state.target)));
    if (panels.length) drawMetric(top.querySelector(".metric"), model, state.target, request);
    side.replaceChildren(...(panels.length ? [drawNode(panels)] : []), ...panels.map(drawPanel));
    top.querySelector(".restore").disabled =
      !panels.some((panel) => panel.removedHeads.length + panel.removedEdges.length);
    if (focused) side.querySelector(focused)?.focus({ preventScroll: true });
    if (kernel.open) return;
    root.querySelectorAll(".top :is(input, select, button), .side button")
      .forEach((control) => { control.disabled = true; });
  }

  function drawPanel(panel, index) {
    const { target } = state;
    const [column] = figureData(model).targets[target];
    const effects = model.get("_effects").heads?.[index] ?? {};
    return panelCard({ panel, index, target, column, effects, request, onHover });
  }

  function drawNode(panels) {
    const node = model.get("_node");
    if (node) {
      const effects = model.get("_effects").node ?? {};
      const panel = panels[node.panel];
      return nodeCard({ node, panel, target: state.target, effects, request, onHover });
    }
    return make("section", { class: "card node empty" }, make("p", { class: "hint" },
      "Click a node to see what it attends to and what it would predict. ",
      "Click a line to remove that attention edge."));
  }

  // ---- tooltip -------------------------------------------------------------------------------

  const onHover = (lines, event) => showTip(root, lines, event);
  const hideTip = () => { tip.hidden = true; };

  // ---- the saved figure ------------------------------------------------------------------------

  // While this view lives, the figure that is saved with the notebook would be seen twice.
  function hideSaved() {
    const saved = `[data-saved-explorer="${model.get("_saved_id")}"]`;
    // In JupyterLab, the output around it would leave a gap.
    const around = `.jp-OutputArea-child:has(> .jp-OutputArea-output ${saved})`;
    const style = make("style", {}, `${saved}, ${around} { display: none; }`);
    document.head.append(style);
    return style;
  }

  // Without a figure, where the models or the prompt cannot be shown, there is only a message.
  function drawAll() {
    if ("svg" in model.get("_figure")) drawDiagram();
    drawSide();
  }

  drawTop();
  drawAll();
  showMessage(model.get("_message"));
  const style = hideSaved();
  const unfollow = followTheme(root, model.get("_theme"), el);
  if (el.closest(".jupyter-widgets-disconnected")) die(NO_KERNEL);
  const listeners = {
    "change:_figure": () => {
      drawAll();
      settleLater();
      kernel.askEffects();
    },
    "change:_effects": drawSide,
    "change:_node": onNode,
    "change:_prompt": () => { top.querySelector("input").value = model.get("_prompt"); },
    "change:_message": () => showMessage(model.get("_message")),
    "msg:custom": kernel.onAnswer,
    // ipywidgets tells of it when the kernel restarts.
    comm_live_update: () => die(RESTARTED),
  };
  for (const [name, listener] of Object.entries(listeners)) model.on(name, listener);
  side.addEventListener("pointerover", (event) => {
    if (!event.target.closest(".cell")) hideTip();
  });
  side.addEventListener("pointerleave", hideTip);
  root.addEventListener("pointerenter", kernel.look); // weights may have changed meanwhile
  kernel.hello();
  root.setAttribute("data-live", "");
  return () => {
    kernel.close();
    for (const timer of [settling, choosing, patience]) clearTimeout(timer);
    unfollow();
    style.remove();
    for (const [name, listener] of Object.entries(listeners)) model.off(name, listener);
  };
}

export default { render };
