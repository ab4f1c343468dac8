// Unpacks chunks (packed by rollouts.py) into completions. A completion knows its chunk, the start of its tokens, and the
// values that the list shows, filters and sorts by.

const chunks = new Map();

function chunk(id) {
  if (!chunks.has(id)) chunks.set(id, unpacked(byId(`chunk-${id}`).textContent));
  return chunks.get(id);
}

async function unpacked(text) {
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const size = new DataView(bytes.buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + size)));
  const n = head.lengths.reduce((a, b) => a + b, 0);
  const own = {...head, numbers: {}};
  let at = 4 + size;
  for (const name of DATA.numbers) {
    own.numbers[name] = joined(bytes.subarray(at, at + 4 * n), n);
    at += 4 * n;
  }
  own.piece = new Int32Array(bytes.slice(at, at + 4 * n).buffer);
  own.clip = bytes.subarray(at + 4 * n, at + 5 * n);
  own.free = [head.clip_states.indexOf("free"), head.clip_states.indexOf("not trained")];
  own.states = new Set([...new Set(own.clip)].map((i) => head.clip_states[i]));
  own.observed = head.clip_states.indexOf("observed");
  own.completions = completions(own);
  return own;
}

// Joins the four byte planes of f32[n].
function joined(planes, n) {
  const bytes = new Uint8Array(4 * n);
  for (let plane = 0; plane < 4; plane++) {
    for (let i = 0; i < n; i++) bytes[4 * i + plane] = planes[plane * n + i];
  }
  return new Float32Array(bytes.buffer);
}

function completions(own) {
  const found = [];
  let start = 0, number = 0;
  own.sizes.forEach((size, group) => {
    for (let i = 0; i < size; i++, number++) {
      const length = own.lengths[number];
      found.push({
        own, group, number, start, length,
        step: own.step,
        verdict: own.verdicts[number],
        finish: own.finish[number],
        turns: own.turns[number],
        reward: own.rewards[number],
        paid: own.parts.length ? ` = ${own.parts.map((part, k) => `${part} ${signed(own.paid[number][k], 2)}`).join(", ")}` : "",
        versions: own.versions[number],
        ...measured(own, start, length),
      });
      start += length;
    }
  });
  return found;
}

function measured(own, start, length) {
  const {gap, ratio, kl, advantage} = own.numbers;
  let clipped = 0, sumKl = 0, sumAdvantage = 0, worstGap = 0, worstRatio = 0, read = 0;
  for (let t = start; t < start + length; t++) {
    if (own.clip[t] === own.observed) {
      read++;
      continue;
    }
    if (!own.free.includes(own.clip[t])) clipped++;
    sumKl += kl[t];
    sumAdvantage += advantage[t];
    worstGap = Math.max(worstGap, Math.abs(gap[t]));
    worstRatio = Math.max(worstRatio, Math.abs(ratio[t]));
  }
  const n = Math.max(length - read, 1);
  return {read, clipped: clipped / n, kl: sumKl / n, advantage: sumAdvantage / n, gap: worstGap, ratio: worstRatio};
}

const piece = (own, token) => own.pieces[own.piece[token]];

// Whether a token's piece is the name of a special token, which the completion's text does not have.
const isSpecial = (own, token) => own.specials.includes(own.piece[token]);

// The text of a completion; made at first use and kept.
function textOf(completion) {
  if (completion.text === undefined) {
    const {own, start, length} = completion;
    const parts = [];
    for (let t = start; t < start + length; t++) if (!isSpecial(own, t)) parts.push(piece(own, t));
    completion.text = parts.join("");
  }
  return completion.text;
}

// The tokens of a completion that overlap stretches [first, end] of its text, as places in the completion.
function tokensIn(completion, stretches) {
  const {own, start, length} = completion, found = new Set();
  for (let i = 0, at = 0; stretches.length && i < length; i++) {
    const from = at;
    at += isSpecial(own, start + i) ? 0 : piece(own, start + i).length;
    if (stretches.some(([first, end]) => from < end && at > first)) found.add(i);
  }
  return found;
}

// The tokens of tool calls.
function callsOf(completion) {
  completion.calls ??= tokensIn(completion, [...textOf(completion).matchAll(/<tool_call>[^]*?(?:<\/tool_call>|$)/g)].map(
    (m) => [m.index, m.index + m[0].length]));
  return completion.calls;
}

// The tokens of the text that is sought.
function foundIn(completion, sought) {
  const text = textOf(completion).toLowerCase(), stretches = [];
  for (let at = sought ? text.indexOf(sought) : -1; at >= 0; at = text.indexOf(sought, at + sought.length)) {
    stretches.push([at, at + sought.length]);
  }
  return tokensIn(completion, stretches);
}

const FILTERS = {
  wrong: {label: "wrong", keep: (all) => (c) => c.verdict !== "right"},
  truncated: {label: "truncated", keep: (all) => (c) => c.finish !== "stop"},
  clipped: {label: "most clipped", keep: (all) => above(all, "clipped")},
  kl: {label: "highest KL", keep: (all) => above(all, "kl")},
};

// Keeps completions in the highest tenth of a quantity and above 0.
function above(all, name) {
  const values = Float64Array.from(all, (c) => c[name]).sort();
  const bound = values[Math.floor(0.9 * values.length)] ?? 0;
  return (c) => c[name] > 0 && c[name] >= bound;
}

const ORDERS = {
  sampled: {label: "as sampled", value: () => 0},
  reward: {label: "reward, lowest", value: (c) => c.reward},
  advantage: {label: "advantage, highest", value: (c) => -c.advantage},
  length: {label: "longest", value: (c) => c.read - c.length},
  ratio: {label: "largest |log-ratio|", value: (c) => -c.ratio},
  kl: {label: "highest KL", value: (c) => -c.kl},
  clipped: {label: "most clipped", value: (c) => -c.clipped},
  gap: {label: "largest gap", value: (c) => -c.gap},
};
