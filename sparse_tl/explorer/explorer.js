// The live circuit explorer: the interactive diagram with cards beside it. The kernel removes and
// restores parts on request, and sends new numbers. circuit_diagram.js draws the diagram,
// explorer_parts.js the cards; explorer_kernel.js is the connection to the kernel.

const NO_KERNEL = "This is a saved view without a kernel: run the cell to use it.";
const RESTARTED = "The kernel was restarted: run the cell again. This view is no longer connected; " +
  "only the diagram itself still works.";

function render({ model, el }) {
  const theme = model.get("_theme");
  const root = make("div", {
    class: `sparse-tl-explorer${theme === "auto" ? " sparse-tl-auto" : ""}`, "data-dark": theme === "dark",
  });
  const tip = make("div", { class: "tip", role: "tooltip", hidden: true });
  const message = make("div", { class: "message", role: "alert", hidden: true });
  const top = make("div", { class: "top" });
  const summary = make("div", { class: "summary" });
  const diagram = make("div", { class: "diagram" });
  const side = make("div", { class: "side" });
  // The tooltip comes first, since the diagram has another of the same class.
  const head = make("div", { class: "head" }, top, message, summary);
  root.append(tip, head, make("div", { class: "columns" }, diagram, side));
  el.replaceChildren(root);

  let state = null; // the diagram's target, weight, limit, head and focus
  let settleTimer = null;
  let choiceTimer = null;
  let reportTimer = null;
  const kernel = connect(model, onKernel);

  // ---- the kernel ----------------------------------------------------------------------------

  function request(content) {
    message.hidden = true; // of an earlier request
    sendChoices();
    kernel.request(content);
  }

  // Effects are computed while no other request is waiting.
  function onKernel({ busy, waited, more, isFree }) {
    clearTimeout(reportTimer);
    root.toggleAttribute("data-busy", busy);
    const status = top.querySelector(".status");
    const words = busy ? "computing \u2026" : more ? progressText(model) : "";
    // The kernel may be busy with another cell, or gone: widgets only learn of a restart.
    status.textContent = waited < 3000 ? words : waited < 10000 ? "waiting for the kernel \u2026" :
      "no answer: the kernel is busy, or was restarted and the cell must run again";
    if (waited || busy) reportTimer = setTimeout(kernel.report, 1000);
    if (more && isFree) kernel.askEffects();
  }

  // Updates the figure saved with the notebook, a while after the last change.
  function settleLater() {
    clearTimeout(settleTimer);
    settleTimer = setTimeout(() => kernel.notify({ action: "update_saved" }), 700);
  }

  // Sends the reader's choices, before Python computes or saves anything.
  function sendChoices() {
    if (choiceTimer === null) return;
    clearTimeout(choiceTimer);
    choiceTimer = null;
    const threshold = state.limit / figureData(model).steps;
    kernel.notify({ action: "choose", target: state.target, weight: state.weight, threshold });
    if (state.weight === "effect") kernel.askEffects(); // for the lines too
    settleLater();
  }

  // Without a kernel, nothing can be recomputed; only the diagram itself still works.
  function disconnect(words) {
    kernel.close();
    clearTimeout(settleTimer);
    clearTimeout(choiceTimer);
    root.setAttribute("data-dead", "");
    drawSide();
    showMessage({ kind: "error", text: words });
  }

  function showMessage(content) {
    message.hidden = !content;
    if (!content) return;
    const close = make("button", {
      type: "button", "aria-label": "close", onclick: () => { message.hidden = true; },
    }, "\u00d7");
    message.className = `message ${content.kind}`;
    message.replaceChildren(make("span", {}, content.text), close);
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
        request({ action: "show_prompt", prompt: input.value });
      },
    }, make("label", {}, "Prompt", input), make("button", { type: "submit" }, "Run"));
    // Jupyter's keyboard shortcuts must not act while the reader types.
    form.addEventListener("keydown", (event) => event.stopPropagation());
    const restore = make("button", {
      type: "button", class: "restore", onclick: () => request({ action: "restore" }),
    }, "Restore all");
    top.replaceChildren(form, make("span", { class: "metric" }), restore,
      make("span", { class: "status", "aria-live": "polite" }));
  }

  function drawDiagram() {
    const figure = emptyFigure(), data = figureData(model);
    const [focused, scrolled] = [focusedIn(diagram), diagram.querySelector(".canvas")?.scrollLeft];
    if (state) state = { ...state, ...choicesIn(data) };
    diagram.replaceChildren(figure);
    const known = data.targets.map(([column]) => column);
    start(figure, data, {
      state,
      positions: model.get("_positions").filter((column) => !known.includes(column)),
      onPosition: (column) => request({ action: "show_position", column }),
      removed: model.get("_panels").map((panel) => removedLines(panel.removedEdges)),
      onState,
      onEdges: (panel, edges) => request({ action: "toggle_attention_edges", panel, edges }),
    });
    if (scrolled) figure.querySelector(".canvas").scrollLeft = scrolled;
    if (focused) diagram.querySelector(focused)?.focus({ preventScroll: true });
  }

  // The reader's choices, as far as a new figure allows them.
  function choicesIn(data) {
    const target = Math.min(state.target, data.targets.length - 1);
    const node = model.get("_node");
    const focus = node && { panel: node.panel, level: node.level, column: node.column };
    const panel = focus && state.panel >= 0 ? focus.panel : state.panel;
    return { target, limit: Math.max(state.limit, data.floors[state.weight]), focus, panel };
  }

  // A selector for the cell of a card with the keyboard focus.
  function describeCell() {
    const { head, edge } = document.activeElement?.dataset ?? {};
    if (!side.contains(document.activeElement)) return null;
    if (edge) return `[data-edge="${edge}"]`;
    const panel = document.activeElement.closest(".card")?.dataset.panel;
    return head && `.card[data-panel="${panel}"] [data-head="${head}"]`;
  }

  function removedLines(edges) {
    const lines = Map.groupBy(edges, ([layer, , query, key]) => [layer, query, key].join());
    return [...lines.values()].map((all) => {
      const [[layer, , query, key]] = all;
      return { layer, query, key, heads: all.map(([, head]) => head) };
    });
  }

  function onState(now) {
    const before = state;
    state = { ...now };
    if (!before) return;
    message.hidden = true;
    if (before.target !== now.target || before.panel !== now.panel) drawSide();
    if (JSON.stringify(before.focus) !== JSON.stringify(now.focus)) {
      kernel.request(now.focus ? { action: "select", ...now.focus } : { action: "unselect" });
      return;
    }
    clearTimeout(choiceTimer);
    choiceTimer = setTimeout(sendChoices, 200);
  }

  // Marks the node of the card in the diagram, even if Python selected it.
  function onNode() {
    const node = model.get("_node");
    const { panel, level, column } = state.focus ?? {};
    if (node && (node.panel !== panel || node.level !== level || node.column !== column)) {
      drawDiagram();
    }
    drawSide();
    side.scrollTop = 0;
    // Near the end of a long diagram, its top may be out of view.
    if (root.matches(":hover, :focus-within")) {
      side.firstElementChild.scrollIntoView({ block: "nearest" });
    }
  }

  function drawSide() {
    hideTip();
    const focused = describeCell();
    const panels = model.get("_panels");
    summary.replaceChildren(...panels.map((panel) => outcome(panel, state.target)));
    drawMetric(top.querySelector(".metric"), model, state.target, request);
    const cards = panels.map(drawPanel);
    side.replaceChildren(drawNode(panels), ...cards[state.panel] ? [cards[state.panel]] : cards);
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

  // Hides the figure saved with the notebook, which would appear twice while this view is live.
  function hideSaved() {
    const saved = `[data-saved-explorer="${model.get("_saved_id")}"]`;
    // Also JupyterLab's output around it, which would leave a gap.
    const around = `.jp-OutputArea-child:has(> .jp-OutputArea-output ${saved})`;
    const style = make("style", {}, `${saved}, ${around} { display: none; }`);
    document.head.append(style);
    return style;
  }

  function drawAll() {
    drawDiagram();
    drawSide();
  }

  drawTop();
  drawAll();
  showMessage(model.get("_message"));
  const style = hideSaved();
  if (el.closest(".jupyter-widgets-disconnected")) disconnect(NO_KERNEL);
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
    // ipywidgets sends this when the kernel restarts.
    comm_live_update: () => disconnect(RESTARTED),
  };
  for (const [name, listener] of Object.entries(listeners)) model.on(name, listener);
  side.addEventListener("pointerover", (event) => {
    if (!event.target.closest(".cell")) hideTip();
  });
  side.addEventListener("pointerleave", hideTip);
  kernel.hello();
  root.setAttribute("data-live", "");
  return () => {
    kernel.close();
    for (const timer of [settleTimer, choiceTimer, reportTimer]) clearTimeout(timer);
    style.remove();
    for (const [name, listener] of Object.entries(listeners)) model.off(name, listener);
  };
}

export default { render };
