"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const trace = data.trace;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const variables = {
  "wait for all-gather": "--wait-all-gather",
  "wait for reduce-scatter": "--wait-reduce-scatter",
};
const kindVariable = (kind) => variables[kind] || `--${kind}`;
const three = (value) => value.toLocaleString("en-US", {
  minimumFractionDigits: value >= 100 ? 0 : value >= 10 ? 1 : 2,
  maximumFractionDigits: value >= 100 ? 0 : value >= 10 ? 1 : 2,
});
const count = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 0 });
function duration(ns) {
  if (Math.abs(ns) >= 1e9) return `${three(ns / 1e9)} s`;
  return Math.abs(ns) >= 1e6 ? `${three(ns / 1e6)} ms` : `${three(ns / 1e3)} µs`;
}
function size(nbytes) {
  const units = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
  for (const [unit, one] of units) if (nbytes >= one) return `${three(nbytes / one)} ${unit}`;
  return `${count(nbytes)} B`;
}

/** Round steps of 1, 2 or 5 that divide [from, to] into about `wanted` parts. */
function ticks(from, to, wanted) {
  const span = to - from || 1;
  const power = 10 ** Math.floor(Math.log10(span / wanted));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((each) => span / each <= wanted) || 10 * power;
  const found = [];
  for (let number = Math.ceil(from / step - 1e-9); number * step <= to + step * 1e-9; number++) found.push(number * step || 0);
  return found;
}

/** Like ticks, for bytes: whole powers of two look right in MiB. */
function byteTicks(to, wanted) {
  const unit = to >= 2 ** 30 ? 2 ** 30 : to >= 2 ** 20 ? 2 ** 20 : 2 ** 10;
  return ticks(0, to / unit, wanted).map((value) => value * unit);
}

const tip = document.querySelector(".tip");
function showTip(event, title, lines) {
  tip.replaceChildren();
  const bold = document.createElement("b");
  bold.textContent = title;
  tip.append(bold, `\n${lines.join("\n")}`);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > window.innerWidth ? event.clientX - box.width - 12 : event.clientX + 16;
  const top = Math.min(event.clientY + 16, window.innerHeight - box.height - 8);
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}
const hideTip = () => { tip.hidden = true; };

function svg(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

/** Buttons of which one is pressed. */
function choices(role, labels, pressed, choose) {
  const group = document.querySelector(`[data-role="${role}"]`);
  group.replaceChildren();
  if (labels.length < 2) return;
  labels.forEach((label, index) => {
    const button = document.createElement("button");
    button.textContent = label;
    button.setAttribute("aria-pressed", String(index === pressed));
    button.addEventListener("click", () => {
      group.querySelectorAll("button").forEach((each) => each.setAttribute("aria-pressed", String(each === button)));
      choose(index);
    });
    group.append(button);
  });
}

/** Draw now, when the width changes and when the colour scheme does. */
const drawings = [];
function keepDrawn(element, draw) {
  drawings.push(draw);
  let width = 0;
  new ResizeObserver(() => {
    if (Math.round(element.clientWidth) === width) return;
    width = Math.round(element.clientWidth);
    draw();
  }).observe(element);
  draw();
}
function colourSwatches() {
  document.querySelectorAll("[data-kind]").forEach((node) => {
    node.style.background = `var(${kindVariable(node.dataset.kind)})`;
  });
}
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawings.forEach((draw) => draw()));
/** Paper is narrower than a window: draw for it, with the explanations open. */
function setForPaper(isPaper) {
  document.body.classList.toggle("paper", isPaper);
  document.querySelectorAll("details").forEach((each) => { each.open = isPaper; });
  drawings.forEach((draw) => draw());
}
window.addEventListener("beforeprint", () => setForPaper(true));
window.addEventListener("afterprint", () => setForPaper(false));
colourSwatches();

function frame(element, height) {
  const width = Math.max(element.clientWidth, 200);
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  element.replaceChildren(root);
  return { root, width, height };
}

/** The largest and smallest of those that are numbers; a spread of 100,000 arguments overflows the stack. */
const extent = (values) => values.filter(Number.isFinite).reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
const rounded = (value, write) => (Number.isFinite(value) ? write(value) : value);

/** Parts of a line between points that are no numbers. */
function unbroken(points) {
  const parts = [[]];
  for (const point of points) {
    if (Number.isFinite(point[1])) parts[parts.length - 1].push(point);
    else if (parts[parts.length - 1].length) parts.push([]);
  }
  return parts.filter((part) => part.length);
}

/** Averages with a weight of 0.95 for each step since, without the pull towards zero at the start. */
function runningMean(values) {
  let total = 0, weight = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return value; // the text "nan", which JSON has no number for
    total = 0.95 * total + value;
    weight = 0.95 * weight + 1;
    return total / weight;
  });
}
