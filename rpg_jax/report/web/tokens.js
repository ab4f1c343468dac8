// Tokens in colour: the meaning of the colours, and the numbers of the token under the pointer or in focus.

// Diverging scales have a colour for each sign, other scales one colour; `clip` has a colour for each state.
const COLOURS = {
  ratio: {label: "log-ratio, policy − behaviour", diverging: true},
  gap: {label: "gap, trainer − sampler", diverging: true},
  advantage: {label: "advantage", diverging: true},
  kl: {label: "KL to the reference, k₃"},
  entropy: {label: "entropy"},
  clip: {label: "clip state"},
};
const CLIP_CLASSES = {
  free: "", clipped: "clip-high", high: "clip-high", low: "clip-low", dual: "clip-dual", "not trained": "clip-off",
  observed: "observed",
};
const CLIP_NOTES = { // each loss has its own bounds: docs/methods.md
  clipped: "ratio clipped", high: "ratio above its upper bound", low: "ratio below its lower bound",
  dual: "ratio above its dual bound", "not trained": "not trained",
  observed: "written by the environment, not trained",
};
const PREVIEW = [20, 40]; // tokens made of the beginning and of the end of a completion that is not chosen
const STRONGEST = 72; // % of the colour at the end of the scale

function paint(span, own, token, colour) {
  span.className = "token";
  if (own.clip[token] === own.observed) {
    span.classList.add("observed");
    return;
  }
  if (colour === "clip") {
    const state = CLIP_CLASSES[own.clip_states[own.clip[token]]];
    if (state) span.classList.add(state);
    return;
  }
  const value = own.numbers[colour][token];
  const strength = Math.min(Math.abs(value) / DATA.scales[colour], 1);
  if (!(strength > 0.005)) return;
  span.classList.add(COLOURS[colour].diverging && value < 0 ? "below" : COLOURS[colour].diverging ? "above" : "amount");
  span.style.setProperty("--strength", `${(STRONGEST * strength).toFixed(1)}%`);
}

// The tokens of a completion; only the chosen completion's tokens can take the focus.
function tokenSpans(completion, colour, focusable) {
  const {own, start, length, finish} = completion;
  const skipped = focusable ? 0 : Math.max(length - PREVIEW[0] - PREVIEW[1], 0);
  const line = el("div", {class: "tokens"}), marks = turnMarks(completion), calls = callsOf(completion);
  const found = foundIn(completion, state.contains.toLowerCase());
  for (let i = 0; i < length; i++) {
    if (skipped && i === PREVIEW[0]) {
      line.append(el("span", {class: "muted"}, ` … ${count(skipped)} more … `));
      i += skipped;
    }
    const token = start + i, text = piece(own, token);
    const ends = i === length - 1 ? finish !== "length" : marks.get(i + 1) === "environment";
    const span = el("span", focusable ? {tabindex: i ? "-1" : "0", "data-token": String(i)} : {"data-token": String(i)},
      text || (ends ? "end" : "·"));
    paint(span, own, token, colour);
    if (!text || isSpecial(own, token)) span.classList.add("silent");
    if (calls.has(i)) span.classList.add("call");
    if (found.has(i)) span.classList.add("found");
    if (marks.has(i)) line.append(el("small", {class: "turn"}, marks.get(i)));
    line.append(span);
  }
  return line;
}

// What stands before a token where another begins to speak.
function turnMarks({turns}) {
  const marks = new Map();
  if (!turns) return marks;
  const begins = [0, ...turns.spans.map(([, end]) => end)];
  begins.forEach((token, i) => marks.set(token, `turn ${i + 1} · reward ${fixed(turns.rewards[i] ?? 0, 2)}`));
  for (const [token] of turns.spans) marks.set(token, "environment");
  return marks;
}

// Explains the colours; of the clip states those that tokens of the shown steps have: each loss has its own.
function legend(colour) {
  const place = byId("scale");
  if (colour === "clip") {
    const states = Object.entries(CLIP_NOTES).filter(([name]) => state.all.some((c) => c.own.states.has(name)));
    place.replaceChildren(...states.map(([name, note]) => el("span", {class: "swatch"},
      el("i", {class: `token ${CLIP_CLASSES[name]}`}, name), el("small", {}, name === note ? "" : note))));
    return;
  }
  const top = DATA.scales[colour], {diverging} = COLOURS[colour];
  place.replaceChildren(
    el("small", {}, diverging ? `≤ ${number(-top, 2)}` : "0"),
    el("i", {class: `ramp ${diverging ? "diverging" : "sequential"}`, "aria-hidden": "true"}),
    el("small", {}, `≥ ${number(top, 2)}${colour === "advantage" ? "" : " nats"}`));
}

// Shows all numbers of a token, in a strip of fixed height.
function readout(strip, completion, i) {
  const {own, start, length} = completion;
  const token = start + i, numbers = own.numbers;
  const old = numbers.behaviour[token];
  const policy = old + numbers.ratio[token];
  const cells = [
    [`token ${i + 1} of ${length}`, JSON.stringify(piece(own, token))],
    ["log π sampler", number(old - numbers.gap[token])],
    ["log π behaviour", number(old)],
    ["log π policy", number(policy)],
    ["log π reference", number(policy - numbers.reference[token])],
    ["ratio w", number(Math.exp(numbers.ratio[token]))],
    ["log w", number(numbers.ratio[token])],
    ["gap", number(numbers.gap[token])],
    ["KL", number(numbers.kl[token])],
    ["entropy", number(numbers.entropy[token])],
    ["advantage", number(numbers.advantage[token])],
    ["clip", own.clip_states[own.clip[token]]],
  ];
  strip.replaceChildren(...cells.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}
