"use strict";

// The page's data, elements, and numbers as text. Text from runs reaches the document through text nodes only.

const DATA = JSON.parse(document.getElementById("data").textContent);

const byId = (id) => document.getElementById(id);

function make(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// el("td", {class: "number"}, "1.0"): strings become text nodes.
const el = (tag, attributes = {}, ...children) => make(document.createElement(tag), attributes, children);

const svg = (tag, attributes = {}, ...children) =>
  make(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const minus = (text) => text.replaceAll("-", "−");

// 12,345 · 123 · 1.23 · 0.0123 · 3.6e−7
function number(x, digits = 3) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (x === 0) return "0";
  const size = Number(Math.abs(x).toPrecision(digits));
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  if (size >= 10 ** digits) return minus(Math.round(x).toLocaleString("en-US"));
  if (size < 1e-3) return minus(x.toExponential(Math.max(digits - 2, 0)));
  return minus(x.toFixed(Math.min(Math.max(digits - 1 - Math.floor(Math.log10(size)), 0), digits + 1)));
}

const count = (n) => n.toLocaleString("en-US");

const fixed = (x, places) => minus(x.toFixed(places));

const signed = (x, places) => (x > 0 ? "+" : "") + fixed(x, places);

// Six colours that colour-blind people can tell apart; the next six configs are dashed, with a round key.
const hue = (i) => `hue-${i % 6} dash-${Math.floor(i / 6) % 3}`;

const key = (i) => el("i", {class: `key ${hue(i)}`, "aria-hidden": "true"});
