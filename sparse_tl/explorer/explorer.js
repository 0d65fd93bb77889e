// The live circuit explorer: the interactive diagram, cards beside it, and messages to the kernel,
// which removes and restores parts and sends all numbers anew. The diagram's own script is in
// circuit_diagram.js, the cards are in explorer_parts.js.

const NO_KERNEL = "This is a saved view without a kernel: run the cell to use it.";
const RESTARTED = "The kernel was restarted: run the cell again.";

function render({ model, el }) {
  const root = make("div", { class: "sparse-tl-explorer" });
  root.toggleAttribute("data-dark", model.get("_dark"));
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
  let pending = 0; // requests that the kernel has not answered
  let requests = 0;
  let settling = null;
  let patience = null;
  let alive = el.closest(".jupyter-widgets-disconnected") === null;

  // ---- the kernel ----------------------------------------------------------------------------

  function request(content) {
    if (!alive) return;
    pending++;
    showPending();
    model.send({ ...content, id: ++requests });
  }

  function onAnswer(content) {
    if (!content.done) return; // nobody waits for what is saved
    pending = Math.max(0, pending - 1);
    showPending();
  }

  function showPending() {
    const status = top.querySelector(".status");
    clearTimeout(patience);
    root.toggleAttribute("data-busy", pending > 0);
    status.textContent = pending ? "computing \u2026" : "";
    if (!pending) return;
    // It may be at work in another cell, or gone: only a restart is told to widgets.
    patience = setTimeout(() => { status.textContent = "waiting for the kernel \u2026"; }, 3000);
  }

  // A while after the last change, what is saved with the notebook is brought up to date.
  function settleLater() {
    clearTimeout(settling);
    if (!alive) return;
    settling = setTimeout(() => model.send({ action: "settle" }), 700);
  }

  // Without a kernel nothing can be recomputed; the diagram itself still works.
  function die(words) {
    alive = false;
    pending = 0;
    clearTimeout(settling);
    showPending();
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
    if (!alive) return;
    model.set("_message", null);
    model.save_changes();
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
        request({ action: "prompt", text: input.value });
      },
    }, make("label", {}, "Prompt", input), make("button", { type: "submit" }, "Run"));
    // Jupyter has keys of its own, which must not work while somebody types.
    form.addEventListener("keydown", (event) => event.stopPropagation());
    const restore = make("button", {
      type: "button", class: "restore", onclick: () => request({ action: "restore" }),
    }, "Restore all");
    top.replaceChildren(form, restore, make("span", { class: "status", "aria-live": "polite" }));
  }

  function drawDiagram() {
    const { svg, data } = model.get("_figure");
    const figure = make("div", { class: "sparse-tl-circuit", "data-ready": true });
    figure.innerHTML = '<div class="controls"></div><div class="canvas"></div>' +
      '<div class="tip" role="tooltip" hidden></div>';
    figure.querySelector(".canvas").innerHTML = svg;
    const focused = describeFocus();
    if (state) state = { ...state, ...choicesIn(data) };
    diagram.replaceChildren(figure);
    start(figure, data, {
      state,
      removed: model.get("_panels").map((panel) => removedLines(panel.removedEdges)),
      onState,
      onEdges: (panel, edges) => request({ action: "edges", panel, edges }),
    });
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
      request(now.focus ? { action: "node", ...now.focus } : { action: "close" });
    }
    if (!alive) return;
    // What Python should know of the reader's choices, before it computes or saves anything.
    const threshold = now.limit / model.get("_figure").data.steps;
    model.set("_state", { target: now.target, weight: now.weight, threshold });
    model.save_changes();
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
    const panels = model.get("_panels");
    summary.replaceChildren(...panels.map((panel) =>
      outcome(panel.name, panel.outputs[state.target])));
    side.replaceChildren(...(panels.length ? [drawNode(panels)] : []), ...panels.map(drawPanel));
    const some = panels.some((p) => p.removedHeads.length + p.removedEdges.length);
    top.querySelector(".restore").disabled = !some;
    if (alive) return;
    for (const control of root.querySelectorAll(".top input, .top button, .side button")) {
      control.disabled = true;
    }
  }

  function drawPanel(panel, index) {
    const { target } = state;
    const [column] = model.get("_figure").data.targets[target];
    return panelCard({ panel, index, target, column, request, onHover });
  }

  function drawNode(panels) {
    const node = model.get("_node");
    if (node) return nodeCard({ node, name: panels[node.panel].name, request, onHover });
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
    const style = make("style", {},
      `${saved}, .jp-OutputArea-child:has(> .jp-OutputArea-output ${saved}) { display: none; }`);
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
  if (!alive) die(NO_KERNEL);
  const listeners = {
    "change:_figure": () => {
      drawAll();
      settleLater();
    },
    "change:_state": settleLater,
    "change:_node": onNode,
    "change:_prompt": () => { top.querySelector("input").value = model.get("_prompt"); },
    "change:_message": () => showMessage(model.get("_message")),
    "msg:custom": onAnswer,
    // ipywidgets tells of it when the kernel restarts.
    comm_live_update: () => die(RESTARTED),
  };
  for (const [name, listener] of Object.entries(listeners)) model.on(name, listener);
  side.addEventListener("pointerover", (event) => {
    if (!event.target.closest(".cell")) hideTip();
  });
  side.addEventListener("pointerleave", hideTip);
  root.setAttribute("data-live", "");
  return () => {
    clearTimeout(settling);
    clearTimeout(patience);
    style.remove();
    for (const [name, listener] of Object.entries(listeners)) model.off(name, listener);
  };
}

export default { render };
