// The rollout browser: the choices, the list (only its visible rows exist), the chosen completion's group.

const OVERSCAN = 12; // rows made above and below the visible ones

const state = {run: 0, step: "", group: "", sort: "sampled", colour: "ratio", contains: "", filters: new Set(),
  all: [], list: [], at: 0};

const MARKS = {right: "✓", wrong: "✗"};
const CUT = {length: "cut off by the limit", turns: "out of turns"};

const good = (c) => (c.verdict === "right" ? "right" : "wrong");

function browser() {
  const withRollouts = DATA.runs.map((run, i) => [run, i]).filter(([run]) => run.kept.length);
  if (!withRollouts.length) {
    byId("rollouts-note").textContent = "No run has rollout files; log.rollouts_every sets the steps that write them.";
    return Promise.resolve();
  }
  byId("browser").hidden = false;
  fill("run", withRollouts.map(([run, i]) => [i, run.name]));
  fill("sort", Object.entries(ORDERS).map(([name, {label}]) => [name, label]));
  fill("colour", Object.entries(COLOURS).map(([name, {label}]) => [name, label]));
  byId("list-head").append(
    ...["", "reward", "adv.", "tokens", "clip %", "KL", "prompt and end", "answer"].map((name) => el("span", {}, name)));
  byId("filters").append(...Object.entries(FILTERS).map(([name, {label}]) => {
    const button = el("button", {type: "button", "aria-pressed": "false", "data-filter": name}, label);
    button.addEventListener("click", () => toggle(name));
    return button;
  }));
  byId("run").addEventListener("change", (event) => chooseRun(+event.target.value));
  byId("step").addEventListener("change", (event) => chooseStep(event.target.value));
  byId("group").addEventListener("change", (event) => { state.group = event.target.value; refresh(); });
  byId("sort").addEventListener("change", (event) => { state.sort = event.target.value; refresh(); choose(0); });
  byId("contains").addEventListener("input", (event) => { state.contains = event.target.value; refresh(); });
  byId("colour").addEventListener("change", (event) => { state.colour = event.target.value; recolour(); });
  byId("list").addEventListener("scroll", () => requestAnimationFrame(rows), {passive: true});
  byId("list").addEventListener("click", (event) => {
    const row = event.target.closest("[data-row]");
    if (row) choose(+row.dataset.row);
  });
  addEventListener("keydown", keys);
  addEventListener("resize", () => requestAnimationFrame(rows));
  watchTokens();
  return chooseRun(withRollouts[0][1]);
}

function fill(id, options) {
  byId(id).replaceChildren(...options.map(([value, text]) => el("option", {value: String(value)}, text)));
}

async function chooseRun(run) {
  state.run = run;
  byId("run").value = String(run);
  const {kept, backwards} = DATA.runs[run];
  byId("backwards").hidden = !backwards;
  fill("step", [...kept.map((k) => [k.step, `${k.step}`]), ...(kept.length > 1 ? [["every", "every step kept"]] : [])]);
  const same = kept.some((k) => String(k.step) === state.step) || (state.step === "every" && kept.length > 1);
  await chooseStep(same ? state.step : String(kept.at(-1).step));
}

async function chooseStep(step) {
  state.step = String(step);
  byId("step").value = state.step;
  const {kept} = DATA.runs[state.run];
  const wanted = kept.filter((k) => state.step === "every" || String(k.step) === state.step);
  const run = state.run, read = await Promise.all(wanted.map((k) => chunk(k.chunk)));
  if (run !== state.run || state.step !== String(step)) return;
  state.all = read.flatMap((own) => own.completions);
  legend(state.colour);
  state.group = "";
  const groups = read.flatMap((own) => own.groups.map((group, g) => [`${own.step}/${g}`, group]));
  const named = groups.map(([value, group]) => [value, `${value.split("/")[1]}: ${shorten(group.prompt, 36)}`]);
  fill("group", [["", "every group"], ...named]);
  refresh();
}

const inLine = (text) => text.replace(/\s+/g, " ").trim();

const shorten = (text, most) => {
  const line = inLine(text);
  return line.length > most ? `${line.slice(0, most)}…` : line;
};

// The text around the first place of what is sought; without a place the end of the text.
function excerpt(text, sought) {
  const at = sought ? text.toLowerCase().indexOf(sought) : -1;
  if (at >= 0) return [inLine(text.slice(Math.max(at - 60, 0), at)).slice(-24), shorten(text.slice(at, at + 240), 120)].join(" ");
  const line = inLine(text.slice(-400));
  return line.length > 120 || text.length > 400 ? `…${line.slice(-120)}` : line;
}

function toggle(name, on = !state.filters.has(name)) {
  on ? state.filters.add(name) : state.filters.delete(name);
  document.querySelector(`[data-filter="${name}"]`).setAttribute("aria-pressed", String(on));
  refresh();
}

// Makes the list anew after a change of the choices; the chosen completion stays chosen if it is still in the list.
function refresh() {
  const before = state.list[state.at];
  const tests = [...state.filters].map((name) => FILTERS[name].keep(state.all));
  if (state.group) tests.push((c) => `${c.step}/${c.group}` === state.group);
  const sought = state.contains.toLowerCase();
  if (sought) {
    const has = (text) => text.toLowerCase().includes(sought);
    tests.push((c) => has(textOf(c)) || has(c.own.groups[c.group].prompt) || has(c.own.groups[c.group].answer));
  }
  const {value} = ORDERS[state.sort];
  const list = state.all.filter((c) => tests.every((test) => test(c)));
  if (state.sort !== "sampled") list.sort((a, b) => value(a) - value(b));
  state.list = list;
  byId("spacer").style.height = `${list.length * rowHeight()}px`;
  const right = list.filter((c) => c.verdict === "right").length;
  byId("count").textContent = `${count(list.length)} of ${count(state.all.length)} completions` +
    (list.length ? `, ${fixed((100 * right) / list.length, 1)} % right` : "");
  choose(Math.max(list.indexOf(before), 0));
}

const rowHeight = () => parseFloat(getComputedStyle(byId("list")).getPropertyValue("--row"));

// Makes the visible rows.
function rows() {
  const list = byId("list"), height = rowHeight();
  const first = Math.max(Math.floor(list.scrollTop / height) - OVERSCAN, 0);
  const last = Math.min(Math.ceil((list.scrollTop + list.clientHeight) / height) + OVERSCAN, state.list.length);
  const made = [];
  for (let i = first; i < last; i++) made.push(row(state.list[i], i, height));
  byId("spacer").replaceChildren(...made);
}

function row(c, i, height) {
  const problem = c.own.groups[c.group], sought = state.contains.toLowerCase();
  const ending = !sought || !textOf(c).toLowerCase().includes(sought);
  const made = el("div", {class: "row", role: "option", id: `row-${i}`, "data-row": String(i),
    "aria-selected": String(i === state.at), "aria-posinset": String(i + 1), "aria-setsize": String(state.list.length)},
    el("span", {class: `verdict ${good(c)}`, title: c.verdict, "aria-label": c.verdict},
      MARKS[c.verdict] || "!"),
    el("span", {}, fixed(c.reward, 2)), el("span", {}, signed(c.advantage, 2)),
    el("span", {}, count(c.length - c.read), CUT[c.finish] ? el("abbr", {title: CUT[c.finish]}, "…") : null),
    el("span", {}, c.clipped ? fixed(100 * c.clipped, 0) : "·"), el("span", {}, number(c.kl, 2)),
    el("span", {class: "text"}, el("span", {class: "muted"}, shorten(problem.prompt, 16)),
      el("span", {class: ending ? "ending" : "place"}, el("bdi", {dir: "ltr"}, excerpt(textOf(c), sought)))),
    el("span", {class: "answer", title: problem.answer}, shorten(problem.answer, 24)));
  made.style.transform = `translateY(${i * height}px)`;
  return made;
}

function choose(i, token = null) {
  state.at = Math.min(Math.max(i, 0), Math.max(state.list.length - 1, 0));
  const list = byId("list"), height = rowHeight(), top = state.at * height;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + height > list.scrollTop + list.clientHeight) list.scrollTop = top + height - list.clientHeight;
  rows();
  if (state.list.length) list.setAttribute("aria-activedescendant", `row-${state.at}`);
  else list.removeAttribute("aria-activedescendant");
  detail(token);
}

// Shows the chosen completion under its prompt, then the others of its group.
function detail(token = null) {
  const place = byId("detail"), chosen = state.list[state.at];
  if (!chosen) {
    place.replaceChildren(el("p", {class: "muted"}, "No completion passes the filters."));
    return;
  }
  const {own, group} = chosen, problem = own.groups[group];
  const members = own.completions.filter((c) => c.group === group);
  const right = members.filter((c) => c.verdict === "right").length;
  const strip = el("dl", {class: "strip", "aria-live": "polite"});
  place.replaceChildren(
    el("h3", {}, `Problem ${problem.prompt_id}`, el("small", {},
      ` step ${own.step} · ${right} of ${members.length} right · reference answer `, el("code", {}, problem.answer))),
    el("pre", {class: "prompt", tabindex: "0", "aria-label": "Prompt"}, problem.prompt), strip,
    member(chosen, true), ...members.filter((c) => c !== chosen).map((c) => member(c, false)));
  readout(strip, chosen, token ?? 0);
  place.scrollTop = 0;
  if (token === null) place.querySelector(".chosen .found")?.scrollIntoView({block: "nearest"});
  if (token !== null) place.querySelector(`.chosen [data-token="${token}"]`)?.focus();
}

function member(c, chosen) {
  const versions = c.versions[0] === c.versions[1] ? c.versions[0] : `${c.versions[0]} to ${c.versions[1]}`;
  const facts = [
    `reward ${fixed(c.reward, 2)}${c.paid}`, `advantage ${signed(c.advantage, 3)}`, `${count(c.length - c.read)} tokens`,
    ...(c.turns ? [`${c.turns.rewards.length} turns`, `${count(c.read)} tokens of the environment`] : []),
    ...(c.turns?.error ? [`environment failed: ${c.turns.error}`] : []),
    CUT[c.finish] || c.finish, `weights ${versions}`,
  ];
  const made = el("article", {class: chosen ? "member chosen" : "member", "aria-current": chosen ? "true" : undefined},
    el("div", chosen ? {class: "facts"} : {class: "facts", role: "button", tabindex: "0"},
      el("span", {class: `verdict ${good(c)}`}, `${MARKS[c.verdict] || "!"} ${c.verdict}`),
      ...facts.map((fact) => el("span", {}, fact))),
    tokenSpans(c, state.colour, chosen));
  made.completion = c;
  return made;
}

function recolour() {
  legend(state.colour);
  for (const made of byId("detail").querySelectorAll(".member")) {
    const {own, start} = made.completion;
    for (const span of made.querySelectorAll("[data-token]")) {
      const kept = ["silent", "call", "found"].filter((name) => span.classList.contains(name));
      paint(span, own, start + +span.dataset.token, state.colour);
      span.classList.add(...kept);
    }
  }
}

function watchTokens() {
  const place = byId("detail");
  const show = (event) => {
    const span = event.target.closest?.("[data-token]");
    if (span) readout(place.querySelector(".strip"), span.closest(".member").completion, +span.dataset.token);
  };
  place.addEventListener("pointerover", show);
  place.addEventListener("focusin", show);
  place.addEventListener("click", (event) => {
    const made = event.target.closest(".member:not(.chosen)");
    if (!made) return;
    const token = event.target.closest("[data-token]");
    find(made.completion, token ? +token.dataset.token : null);
  });
}

// Chooses a completion; clears the filters if they hide it.
function find(completion, token) {
  if (!state.list.includes(completion)) clear();
  choose(state.list.indexOf(completion), token);
}

function clear() {
  state.group = state.contains = "";
  byId("group").value = byId("contains").value = "";
  state.filters.clear();
  for (const button of document.querySelectorAll("[data-filter]")) button.setAttribute("aria-pressed", "false");
  refresh();
}

function keys(event) {
  const {key, target} = event;
  if (event.ctrlKey || event.metaKey || event.altKey || target.closest("input, select, svg")) return;
  const inTokens = target.closest("[data-token]"), inList = target.id === "list";
  const page = Math.max(Math.floor(byId("list").clientHeight / rowHeight()) - 1, 1);
  const moves = {j: 1, k: -1};
  const listMoves = {ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity};
  const by = moves[key] ?? (inList ? listMoves[key] : undefined);
  if (by !== undefined) {
    event.preventDefault();
    choose(state.at + by);
    if (inTokens) byId("list").focus();
  } else if (inTokens && (key === "ArrowRight" || key === "ArrowLeft")) {
    event.preventDefault();
    const tokens = [...inTokens.parentElement.querySelectorAll("[data-token]")];
    const next = tokens[tokens.indexOf(inTokens) + (key === "ArrowRight" ? 1 : -1)];
    if (next) {
      inTokens.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }
  } else if (inList && key === "Enter") {
    byId("detail").querySelector(".chosen [data-token]")?.focus();
  } else if (key === "Enter" && target.closest(".member:not(.chosen)")) {
    find(target.closest(".member").completion, 0);
  } else if (inTokens && key === "Escape") {
    byId("list").focus();
  }
}

dynamics();
browser().then(() => {
  document.documentElement.dataset.ready = "";
  performance.mark("ready");
});
