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

/** An element with properties, and what it holds. */
function made(tag, properties, ...parts) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...parts);
  return element;
}

const tip = document.querySelector(".tip");
function showTip(event, title, lines) {
  tip.replaceChildren(made("b", {}, title), `\n${lines.join("\n")}`);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > window.innerWidth ? event.clientX - box.width - 12 : event.clientX + 16;
  const top = Math.min(event.clientY + 16, window.innerHeight - box.height - 8);
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}
const hideTip = () => { tip.hidden = true; };

/** Buttons of which one is pressed. */
function choices(role, labels, pressed, choose) {
  const group = document.querySelector(`[data-role="${role}"]`);
  group.replaceChildren();
  if (labels.length < 2) return;
  labels.forEach((label, index) => {
    const button = made("button", { ariaPressed: String(index === pressed) }, label);
    button.addEventListener("click", () => {
      group.querySelectorAll("button").forEach((each) => { each.ariaPressed = String(each === button); });
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

const rounded = (value, write) => (Number.isFinite(value) ? write(value) : "not finite");
const roundSteps = (one) => Array.from({ length: 40 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** (power - 10) * one)).flat();

/** A chart of uPlot in the page's colours, over the whole width of an element; `tell` gives the tip, [title, lines], of an index and where the pointer is. */
function drawChart(element, { series, data: columns, axes, scales, hooks = {}, tell, height = 270, legend = true }) {
  const shared = { stroke: () => colour("--soft"), font: `12.5px ${colour("--sans")}`, ticks: { show: false } };
  const across = { ...shared, size: 24, space: 90, grid: { show: false }, border: { show: true, stroke: () => colour("--faint"), width: 1 } };
  const up = { ...shared, size: 64, space: 40, grid: { stroke: () => colour("--rule"), width: 1 } };
  element.chart?.destroy();
  element.replaceChildren();
  element.chart = new uPlot({
    width: Math.max(element.clientWidth, 200), height, series, padding: [14, 14, 0, 0],
    axes: [{ ...across, ...axes[0] }, { ...up, ...axes[1] }],
    scales: { x: { time: false, ...scales?.x }, y: scales.y },
    legend: { show: legend, live: false, markers: { dash: (_, index) => (series[index].dash ? "dashed" : "solid") } },
    cursor: { y: false, drag: { x: true, y: false } },
    hooks: {
      ...hooks,
      setCursor: [({ cursor, over, posToVal }) => {
        if (cursor.idx === null || cursor.idx === undefined || cursor.left < 0) { hideTip(); return; }
        const { left, top } = over.getBoundingClientRect();
        showTip({ clientX: left + cursor.left, clientY: top + cursor.top }, ...tell(cursor.idx, posToVal(cursor.left, "x")));
      }],
    },
  }, columns, element);
}

/** Lines over steps, from zero up. Each: label, values, stroke, and perhaps width, points, dash of a level that is the same everywhere; a value that is "nan" leaves a gap. */
function drawLines(name, steps, lines, { write = count, below = () => {} } = {}) {
  const finite = (value) => (Number.isFinite(value) || value === undefined ? value : null);
  const tick = (value) => value.toLocaleString("en-US", { maximumSignificantDigits: 6 });
  const element = document.querySelector(`[data-chart="${name}"]`);
  keepDrawn(element, () => drawChart(element, {
    data: [steps, ...lines.map(({ values }) => values.map(finite))],
    series: [{}, ...lines.map(({ label, stroke, width = 2, dash, points }) => ({
      label, stroke: () => colour(stroke), width, dash, points: { show: points || steps.length === 1, size: 6, fill: () => colour(stroke) },
    }))],
    axes: [{ incrs: roundSteps(1).filter((each) => each >= 1), values: (_, ticks) => ticks.map(count), label: "step", labelSize: 18, labelGap: 0, labelFont: `12.5px ${colour("--sans")}` },
      { incrs: roundSteps(1), values: (_, ticks) => ticks.map(tick) }],
    scales: { x: { range: (_, from, to) => [from, Math.max(to, from + 1)] }, y: { range: (_, low, high) => [0, high * 1.05 || 1] } },
    hooks: { drawAxes: [below] },
    tell: (index) => [`step ${count(steps[index])}`, lines.filter(({ values, dash }) => values[index] !== undefined && !dash)
      .map(({ label, values }) => `${label} ${rounded(values[index], write)}`)],
  }));
}
