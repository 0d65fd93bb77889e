// The explorer's connection to the kernel.

const PATIENCE = 2000; // milliseconds in which an update arrives that was sent before an answer
const EFFECTS_SECONDS = 0.3; // per request for effects, so that others wait no longer

// Sends requests to the kernel, which answers each with its latest revision. If that does not arrive,
// since the page did not listen yet when it was sent, asks for all traits.
//   onChange({ busy, waited, more, isFree })  called when any of these may have changed: whether the
//                       reader waits for a request, for how many milliseconds an answer has been
//                       missing, whether effects are left to compute, and whether they can be
//                       requested, since no request is unanswered
function connect(model, onChange) {
  let sent = 0;
  let answered = 0;
  let urgent = 0; // the last request that the reader waits for
  let latest = 0; // the kernel's revision
  let more = false;
  let open = true;
  let waitsSince = null;
  let timer = null;

  const isBehind = () => model.get("_revision") < latest;

  function post(content) {
    if (!open) return;
    model.send({ ...content, id: ++sent });
    waitsSince ??= Date.now();
    report();
  }

  function report() {
    const waited = waitsSince === null ? 0 : Date.now() - waitsSince;
    onChange({ busy: answered < urgent, waited, more, isFree: answered === sent });
  }

  function onAnswer(content) {
    if (!open || !Number.isInteger(content?.done)) return; // not an answer to a request
    answered = Math.max(answered, content.done);
    [latest, more] = [content.revision, content.more];
    waitsSince = answered < sent || isBehind() ? Date.now() : null;
    clearTimeout(timer);
    if (isBehind()) timer = setTimeout(() => isBehind() && post({ action: "send_again" }), PATIENCE);
    report();
  }

  return {
    get open() { return open; },
    onAnswer,
    report,
    // Sends a request that the reader waits for.
    request(content) {
      urgent = sent + 1;
      post(content);
    },
    // Requests effects, unless another request is unanswered.
    askEffects() {
      if (answered === sent) post({ action: "compute_effects", seconds: EFFECTS_SECONDS });
    },
    // Sends a message that needs no answer.
    notify(content) { if (open) model.send(content); },
    hello() { post({ action: "hello" }); },
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
  const json = model.get("_figure");
  if (parsed.json !== json) Object.assign(parsed, { json, data: JSON.parse(json) });
  return parsed.data;
}
