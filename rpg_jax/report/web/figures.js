// Small multiples of the training dynamics over steps, completions or seconds: the axis at which the results compare.
// Pointer or arrow keys move one crosshair in all of them.

const HEIGHT = 168, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20;
const MOST_AT_FIRST = 6;

const shown = new Set(DATA.configs.map((_, i) => i).filter((i) => i < MOST_AT_FIRST));
const panels = [];
let axis = DATA.axes[0];

// The place of a config's step on the axis.
const place = (config, step) => axis.costs[config][step];

function chooseAxis(name) {
  axis = DATA.axes.find((a) => a.name === name);
  byId("axis-note").textContent = `The horizontal axis has ${axis.unit}; a dashed line is the budget of the results.`;
  panels.forEach(draw);
}

function dynamics() {
  for (const radio of document.querySelectorAll(".switch input")) {
    radio.addEventListener("change", () => chooseAxis(radio.value));
  }
  byId("legend").append(...DATA.configs.map((name, i) => {
    const button = el("button", {type: "button", "aria-pressed": String(shown.has(i))}, key(i), name);
    button.addEventListener("click", () => {
      shown.has(i) ? shown.delete(i) : shown.add(i);
      button.setAttribute("aria-pressed", String(shown.has(i)));
      panels.forEach(draw);
    });
    return button;
  }));
  for (const data of DATA.dynamics) {
    const readout = el("div", {class: "readout", hidden: true});
    const canvas = el("div", {class: "canvas"}, readout);
    const figure = el("figure", {}, el("figcaption", {}, data.title, el("small", {}, data.unit)), canvas);
    byId("figures").append(figure);
    panels.push({data, canvas, readout});
  }
  chooseAxis(document.querySelector(".switch input:checked").value);
  let width = byId("figures").clientWidth;
  new ResizeObserver(() => {
    if (byId("figures").clientWidth === width) return;
    width = byId("figures").clientWidth;
    panels.forEach(draw);
  }).observe(byId("figures"));
}

// About `count` round numbers in [low, high].
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const magnitude = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * magnitude).find((s) => s >= rough * 0.7);
  const first = Math.ceil(low / step - 1e-9);
  const found = [];
  for (let i = first; i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

function extent({curves}) {
  const own = [...shown].map((i) => curves[i]).filter((c) => c);
  const values = own.flatMap((c) => [...c.low, ...c.high, ...(c.held_out || []).map(([, value]) => value)]);
  const low = Math.min(...values), high = Math.max(...values);
  const nearZero = low >= 0 && (low < 0.5 * high || !high);
  const pad = 0.06 * (high - low || Math.abs(high) || 1);
  return [nearZero ? 0 : low - pad, high + pad];
}

const path = (xs, ys) => xs.map((x, i) => `${i ? "L" : "M"}${x.toFixed(1)} ${ys[i].toFixed(1)}`).join("");

function draw(panel) {
  const {data, canvas, readout} = panel;
  const width = canvas.clientWidth;
  const visible = [...shown].filter((i) => data.curves[i] && data.curves[i].steps.length);
  const places = visible.map((i) => data.curves[i].steps.map((step) => place(i, step)));
  const last = Math.max(...places.flat(), 1e-9), first = Math.min(...places.flat(), 0.99 * last);
  const [low, high] = visible.length ? extent(data) : [0, 1];
  const x = (at) => LEFT + ((at - first) / (last - first)) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (value - low) / (high - low || 1)) * (HEIGHT - TOP - BOTTOM);
  const root = svg("svg", {width, height: HEIGHT, tabindex: "0", role: "img", "aria-label": described(data, visible)});
  for (const value of ticks(low, high, 4)) {
    root.append(svg("line", {class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value)}),
      svg("text", {x: LEFT - 6, y: y(value) + 3.5, "text-anchor": "end"}, tick(value)));
  }
  const whole = axis.name !== "seconds";
  for (const at of ticks(first, last, width > 300 ? 4 : 3).filter((at) => !whole || Number.isInteger(at))) {
    root.append(svg("text", {x: x(at), y: HEIGHT - 5, "text-anchor": "middle"}, count(+at.toPrecision(6))));
  }
  if (axis.budget < 0.995 * last && axis.budget > first) {
    root.append(svg("line", {class: "budget", x1: x(axis.budget), x2: x(axis.budget), y1: TOP, y2: HEIGHT - BOTTOM}));
  }
  for (const [n, i] of visible.entries()) {
    const c = data.curves[i], xs = places[n].map(x), single = seedsOf(i) < 2;
    if (single && visible.length < 3) {
      root.append(svg("path", {class: `raw ${hue(i)}`, d: path(xs, c.raw.map((v) => y(clamp(v, low, high))))}));
    } else if (!single) {
      root.append(svg("path", {class: `band ${hue(i)}`,
        d: `${path(xs, c.high.map(y))}L${path([...xs].reverse(), [...c.low].reverse().map(y)).slice(1)}Z`}));
    }
    root.append(svg("path", {class: `line ${hue(i)}`, d: path(xs, c.mean.map(y))}));
    for (const [step, value] of c.held_out || []) {
      const at = place(i, step);
      if (at >= first) root.append(svg("circle", {class: `mark ${hue(i)}`, cx: x(at), cy: y(value), r: 2.6}));
    }
  }
  const hair = svg("line", {class: "hair", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden"});
  root.append(hair);
  Object.assign(panel, {visible, places, hair, x, width});
  root.addEventListener("pointermove", (event) => {
    const share = (event.clientX - root.getBoundingClientRect().left - LEFT) / (width - LEFT - RIGHT);
    point(first + Math.min(Math.max(share, 0), 1) * (last - first), panel);
  });
  root.addEventListener("pointerleave", () => point(null));
  root.addEventListener("blur", () => point(null));
  root.addEventListener("keydown", (event) => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!by || !visible.length) return;
    event.preventDefault();
    const own = places[0];
    const next = panel.at === undefined ? own.length - 1 : nearest(own, panel.at) + by;
    point(own[Math.min(Math.max(next, 0), own.length - 1)], panel);
  });
  canvas.replaceChildren(root, readout);
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

const tick = (value) => (value !== 0 && Math.abs(value) < 1e-3 ? number(value) : minus(String(+value.toPrecision(4))));

const seedsOf = (config) => DATA.runs.filter((run) => run.config === config).length;

function described(data, visible) {
  const ends = visible.map((i) => `${DATA.configs[i]} ${number(data.curves[i].mean.at(-1))}`);
  return `${data.title}, ${data.unit}; at the end: ${ends.join("; ")}`;
}

function nearest(places, at) {
  let best = 0;
  places.forEach((p, i) => { if (Math.abs(p - at) < Math.abs(places[best] - at)) best = i; });
  return best;
}

// Moves the crosshair of all panels to a place on the axis; the panel under the pointer shows the values.
function point(place, at) {
  for (const panel of panels) {
    panel.readout.hidden = panel !== at || place === null;
    panel.at = place === null ? undefined : place;
    if (place === null || !panel.visible.length) {
      panel.hair?.setAttribute("visibility", "hidden");
      continue;
    }
    const own = panel.places[0], exact = own[nearest(own, place)];
    panel.hair.setAttribute("visibility", "visible");
    panel.hair.setAttribute("x1", panel.x(exact));
    panel.hair.setAttribute("x2", panel.x(exact));
    if (panel !== at) continue;
    const title = axis.name === "steps" ? `step ${exact}` : `${number(exact)} ${axis.unit}`;
    panel.readout.replaceChildren(el("b", {}, title), ...panel.visible.map((i, v) => {
      const c = panel.data.curves[i], n = nearest(panel.places[v], exact);
      const range = c.low[n] === c.high[n] ? "" : ` (${number(c.low[n])} to ${number(c.high[n])})`;
      return el("span", {}, key(i), number(c.mean[n]), el("small", {}, range));
    }));
    panel.readout.classList.toggle("left", panel.x(exact) > panel.width / 2);
  }
}
