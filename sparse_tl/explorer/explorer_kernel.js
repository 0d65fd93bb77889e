// The explorer's connection to the kernel.

const FIRST_WAIT = 2000; // milliseconds
const LONGEST_WAIT = 30000;
const EFFECTS_SECONDS = 0.3; // per request for effects, so that others wait no longer

// Sends requests to the kernel, which answers each with its latest revision. If no answer comes, or
// that revision does not arrive, asks again, after longer and longer delays.
//   onChange({ busy, waited, more, isFree })  called when any of these may have changed: whether the
//                       reader waits for a request, for how many milliseconds an answer has been
//                       missing, whether effects are left to compute, and whether they can be
//                       requested, since no request is unanswered
function connect(model, onChange) {
  let sent = 0;
  let answered = 0;
  let urgent = 0; // the last request that the reader waits for
  let latest = null; // the kernel's revision
  let more = false;
  let open = true;
  let wait = FIRST_WAIT;
  let waitsSince = null;
  let lastAnswer = 0;
  let timer = null;

  const isBehind = () => latest === null || model.get("_revision") < latest;
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
    // Only requests all traits if an update is known to be missing.
    post({ action: latest !== null && isBehind() ? "send_again" : "hello" });
  }

  function report() {
    const waited = waitsSince === null ? 0 : Date.now() - waitsSince;
    onChange({ busy: answered < urgent, waited, more, isFree: answered === sent });
  }

  function onAnswer(content) {
    if (!open || !Number.isInteger(content?.done)) return; // not an answer to a request
    answered = Math.max(answered, content.done);
    [latest, more, lastAnswer] = [content.revision, content.more, Date.now()];
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
    // Sends a request that the reader waits for.
    request(content) {
      if (!open) return;
      urgent = sent + 1;
      wait = FIRST_WAIT;
      post(content);
    },
    // Requests effects, unless another request is unanswered.
    askEffects() {
      if (open && answered === sent) post({ action: "compute_effects", seconds: EFFECTS_SECONDS });
    },
    // Sends a message that needs no answer.
    notify(content) { if (open) model.send(content); },
    // Asks for changes in the kernel, if it has not answered for a while.
    checkForChanges() {
      if (open && !isWaiting() && Date.now() - lastAnswer > 2000) post({ action: "hello" });
    },
    hello() { if (open) post({ action: "hello" }); },
    close() {
      open = false;
      clearTimeout(timer);
      [urgent, more, waitsSince] = [0, false, null];
      report();
    },
  };
}

// The data of the current figure; parsed once.
const parsed = { json: null, data: null };
function figureData(model) {
  const { json } = model.get("_figure");
  if (parsed.json !== json) Object.assign(parsed, { json, data: JSON.parse(json) });
  return parsed.data;
}
