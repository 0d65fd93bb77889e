// Where the explorer stands: the kernel that it asks, and the page that it is shown in.

const FIRST_WAIT = 2000; // milliseconds
const LONGEST_WAIT = 30000;
const EFFECTS_SECONDS = 0.3; // how long other requests wait while effects are computed

// Requests to the kernel. Each is answered with the revision of what is shown; where no answer comes,
// or what it tells of has not arrived, it is asked for again, later and later.
//   onChange({ busy, waited, more, isFree })  called when any of them may have changed: whether a
//                       request has no answer, for how many milliseconds there was none, whether
//                       effects are still to be computed, and whether they can be asked for, since
//                       all else has its answer
function connect(model, onChange) {
  let sent = 0;
  let answered = 0;
  let urgent = 0; // the last request that somebody waits for
  let told = null; // the kernel's revision
  let more = false;
  let open = true;
  let wait = FIRST_WAIT;
  let waitsSince = null;
  let lastAnswer = 0;
  let timer = null;

  const isBehind = () => told === null || model.get("_revision") < told;
  const isWaiting = () => answered < sent || isBehind();

  function post(content) {
    model.send({ ...content, id: ++sent });
    waitsSince ??= Date.now();
    clearTimeout(timer);
    timer = setTimeout(askAgain, wait);
    report();
  }

  function askAgain() {
    if (!open || !isWaiting()) return;
    wait = Math.min(2 * wait, LONGEST_WAIT);
    // The whole is sent again only where it is known that something is missing.
    post({ action: told !== null && isBehind() ? "send" : "hello" });
  }

  function report() {
    const waited = waitsSince === null ? 0 : Date.now() - waitsSince;
    onChange({ busy: answered < urgent, waited, more, isFree: answered === sent });
  }

  function onAnswer(content) {
    if (!open || !Number.isInteger(content?.done)) return; // nobody waits for what is saved
    answered = Math.max(answered, content.done);
    [told, more, lastAnswer] = [content.revision, content.more, Date.now()];
    wait = FIRST_WAIT;
    clearTimeout(timer);
    waitsSince = isWaiting() ? Date.now() : null;
    if (isWaiting()) timer = setTimeout(askAgain, wait);
    report();
  }

  return {
    get open() { return open; },
    onAnswer,
    report,
    // What a reader waits for.
    request(content) {
      if (!open) return;
      urgent = sent + 1;
      wait = FIRST_WAIT;
      post(content);
    },
    // Effects, which nobody waits for, if nothing else is asked for.
    askEffects() {
      if (open && answered === sent) post({ action: "effects", seconds: EFFECTS_SECONDS });
    },
    // What needs no answer.
    tell(content) { if (open) model.send(content); },
    // Whether anything has changed in the kernel: asked where it was not heard of for a while.
    look() { if (open && !isWaiting() && Date.now() - lastAnswer > 2000) post({ action: "hello" }); },
    hello() { if (open) post({ action: "hello" }); },
    close() {
      open = false;
      clearTimeout(timer);
      [urgent, more, waitsSince] = [0, false, null];
      report();
    },
  };
}

// ---- light or dark -----------------------------------------------------------------------------

// What notebooks say of a light theme: JupyterLab, VS Code, Colab. DARK_PAGES, of a dark one, is from Python.
const LIGHT_PAGES = 'body[data-jp-theme-light="true"], body.vscode-light, ' +
  'body[data-vscode-theme-kind="vscode-light"], ' +
  'body[data-vscode-theme-kind="vscode-high-contrast-light"], html[theme="light"]';

// Whether the page around an element is dark: by what it says, or else by its ground or its text.
function isOnDark(element) {
  if (document.querySelector(DARK_PAGES)) return true;
  if (document.querySelector(LIGHT_PAGES)) return false;
  for (let node = element; node; node = node.parentElement) {
    const ground = channelsOf(getComputedStyle(node).backgroundColor);
    if (ground && (ground[3] ?? 1) > 0.5) return lightness(ground) < 0.5;
  }
  return lightness(channelsOf(getComputedStyle(element).color) ?? [0, 0, 0]) > 0.5;
}

// Numbers of a computed colour, "rgb(0, 0, 0)" or "rgba(0, 0, 0, 0.5)".
function channelsOf(colour) {
  return /^rgba?\(/.test(colour) ? colour.match(/[\d.]+/g).map(Number) : null;
}

function lightness([red, green, blue]) {
  return (0.3 * red + 0.59 * green + 0.11 * blue) / 255;
}

// Keeps an element dark or light, as it is told or as the page is; returns what ends that.
function followTheme(root, theme, page) {
  const apply = () =>
    root.toggleAttribute("data-dark", theme === "dark" || (theme === "auto" && isOnDark(page)));
  apply();
  if (theme !== "auto") return () => {};
  const observer = new MutationObserver(apply);
  for (const element of [document.documentElement, document.body]) {
    observer.observe(element, { attributes: true });
  }
  return () => observer.disconnect();
}

// The data of the figure that is shown; what was parsed last is kept.
const parsed = { json: null, data: null };
function figureData(model) {
  const { json } = model.get("_figure");
  if (parsed.json !== json) Object.assign(parsed, { json, data: JSON.parse(json) });
  return parsed.data;
}
