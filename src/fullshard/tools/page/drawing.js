"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const trace = data.trace;

/** How the page was left before it loaded itself again: scroll, open parts, pressed buttons, zooms. */
const KEPT = `fullshard ${location.pathname}`;
let left = {};
try { if (data.refresh_s) left = JSON.parse(sessionStorage.getItem(KEPT)) || {}; } catch { /* a browser that keeps nothing */ }
const keep = { pressed: { ...left.pressed }, zoom: { ...left.zoom } };
window.addEventListener("pagehide", () => {
  keep.scroll = window.scrollY;
  keep.open = [...document.querySelectorAll("details[open] > summary")].map((each) => each.textContent);
  try { if (data.refresh_s) sessionStorage.setItem(KEPT, JSON.stringify(keep)); } catch { /* the same */ }
});
window.addEventListener("load", () => {
  document.querySelectorAll("details").forEach((each) => { each.open = (left.open || []).includes(each.firstElementChild.textContent); });
  if (left.scroll) window.scrollTo(0, left.scroll);
});

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const kindVariable = (kind) => `--${kind.replace(" for ", "-")}`;
/** White or black, whichever is read better on a colour #rrggbb. */
function onColour(hex) {
  const [red, green, blue] = [1, 3, 5].map((at) => (parseInt(hex.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.19 ? "#ffffff" : "#14171b";
}
const three = (value) => {
  const digits = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
};
/** A number on an axis: 0.002, 20,000, 1.5M, 3e+29. */
const tick = (value) => (Math.abs(value) >= 1e15 ? Number(value.toPrecision(6)).toExponential()
  : value.toLocaleString("en-US", { maximumSignificantDigits: 6, notation: Math.abs(value) >= 1e6 ? "compact" : "standard" }));
const count = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 0 });
/** A number in the first of the units that is not larger, or the last. */
function scaled(value, units) {
  const [unit, one] = units.find((each) => Math.abs(value) >= each[1]) || units[units.length - 1];
  return `${three(value / one)} ${unit}`;
}
const duration = (ns) => scaled(ns, [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]);
const size = (nbytes) => (nbytes < 1024 ? `${count(nbytes)} B` : scaled(nbytes, [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]));

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
  const at = event.clientX + 16 + box.width > window.innerWidth ? event.clientX - box.width - 12 : event.clientX + 16;
  tip.style.left = `${Math.max(4, at)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 16, window.innerHeight - box.height - 8))}px`;
}
const hideTip = () => { tip.hidden = true; };
const closeOver = (target) => document.querySelectorAll(".over[open]").forEach((each) => { if (!each.contains(target)) each.open = false; });
document.addEventListener("click", (event) => closeOver(event.target));
document.addEventListener("keydown", (event) => { if (event.key === "Escape") closeOver(null); });

/** Buttons of which one is pressed. */
function choices(role, labels, pressed, choose) {
  const group = document.querySelector(`[data-role="${role}"]`);
  if (labels.length < 2) return;
  const press = (index) => {
    keep.pressed[role] = index;
    [...group.children].forEach((each, number) => { each.ariaPressed = String(number === index); });
  };
  group.replaceChildren(...labels.map((label, index) => made("button", { onclick: () => { press(index); choose(index); } }, label)));
  const kept = left.pressed?.[role] ?? pressed;
  press(kept < labels.length ? kept : pressed);
  if (keep.pressed[role] !== pressed) choose(keep.pressed[role]);
}

/** Draw now, when the width changes and when the colour scheme does. */
const drawings = new Map();
function keepDrawn(element, draw) {
  let width = 0;
  if (!drawings.has(element)) {
    new ResizeObserver(() => {
      if (Math.round(element.clientWidth) === width) return;
      width = Math.round(element.clientWidth);
      drawings.get(element)();
    }).observe(element);
  }
  drawings.set(element, draw);
  draw();
}
const drawAll = () => drawings.forEach((draw) => draw());
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
/** Paper is narrower than a window: draw for it, with the explanations open. */
function setForPaper(isPaper) {
  document.body.classList.toggle("paper", isPaper);
  document.querySelectorAll("details").forEach((each) => { each.open = isPaper; });
  drawAll();
}
window.addEventListener("beforeprint", () => setForPaper(true));
window.addEventListener("afterprint", () => setForPaper(false));
document.querySelectorAll("[data-kind]").forEach((node) => { node.style.background = `var(${kindVariable(node.dataset.kind)})`; });

const roundSteps = (one) => Array.from({ length: 40 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** (power - 10) * one)).flat();

/** A chart of uPlot (which scales fonts of whole pixels only) in the page's colours, over the whole width of an element; `tell` gives the tip, [title, lines], of an index and where the pointer is. */
function drawChart(element, { series, data: columns, axes, scales, hooks = {}, tell, height = 270, legend = true }) {
  const shared = { stroke: () => colour("--soft"), font: `12px ${colour("--sans")}`, ticks: { show: false } };
  const across = { ...shared, size: 24, space: 60, grid: { show: false }, border: { show: true, stroke: () => colour("--faint"), width: 1 } };
  const up = { ...shared, size: 64, space: 40, grid: { stroke: () => colour("--rule"), width: 1 } };
  const name = element.dataset.chart;
  element.chart?.destroy();
  element.replaceChildren();
  const chart = element.chart = new uPlot({
    width: Math.max(element.clientWidth, 200), height, series, padding: [14, 22, 0, 0],
    axes: [{ ...across, ...axes[0] }, { ...up, ...axes[1] }],
    scales: { x: { time: false, ...scales?.x }, y: scales.y },
    legend: { show: legend, live: false, markers: { dash: (_, index) => (series[index].dash ? "dashed" : "solid") } },
    cursor: { y: false, drag: { x: true, y: false } },
    hooks: {
      ...hooks,
      setCursor: [({ cursor, over, posToVal }) => {
        if (cursor.idx === null || cursor.idx === undefined || cursor.left < 0) { hideTip(); return; }
        const box = over.getBoundingClientRect();
        showTip({ clientX: box.left + cursor.left, clientY: box.top + cursor.top }, ...tell(cursor.idx, posToVal(cursor.left, "x")));
      }],
      setSelect: [({ select, posToVal }) => { if (select.width) keep.zoom[name] = [select.left, select.left + select.width].map((at) => posToVal(at, "x")); }],
    },
  }, columns, element);
  chart.over.addEventListener("dblclick", () => { delete keep.zoom[name]; });
  const [min, max] = keep.zoom[name] || [];
  if (max > min) chart.setScale("x", { min, max });
}

/**
 * Lines over steps, or over what else counts along. Each line: label, values, stroke, and perhaps width, points, dash of a level that is
 * the same everywhere; a value that is "nan" leaves a gap. marks: [x, text, stroke] are drawn as thin lines across; fromZero: false lets
 * the axis begin where the data does, and says so.
 */
function drawLines(name, xs, lines, { write = count, fromZero = true, marks = [], band, across = "step", writeX = count } = {}) {
  const isNumber = (value) => Number.isFinite(value);
  const element = document.querySelector(`[data-chart="${name}"]`);
  /** Where points are drawn: everywhere if there are few, and where a line has no neighbour to lead to. */
  const pointsOf = (values, points) => {
    const known = values.map((_, index) => index).filter((index) => values[index] !== undefined);
    const leads = (at) => isNumber(values[known[at]]);
    return known.filter((_, at) => leads(at) && (points || known.length <= 30 || !(leads(at - 1) || leads(at + 1))));
  };
  const below = ({ ctx, bbox: { left, top, width, height }, valToPos, scales }) => {
    const place = (x) => Math.min(Math.max(valToPos(x, "x", true), left), left + width);
    const ratio = uPlot.pxRatio;
    ctx.save();
    if (band) {
      ctx.globalAlpha = 0.16;
      ctx.fillStyle = colour("--faint");
      const [begin, end] = [place(band[0] - 0.5), place(band[1] + 0.5)];
      ctx.fillRect(begin, top, Math.max(end - begin, 2), height);
      ctx.globalAlpha = 1;
    }
    for (const [x, , stroke, dash] of marks) {
      if (x < scales.x.min || x > scales.x.max) continue;
      ctx.strokeStyle = colour(stroke);
      ctx.lineWidth = 1.3 * ratio;
      ctx.setLineDash(dash ? [4 * ratio, 4 * ratio] : []);
      ctx.beginPath(); ctx.moveTo(place(x), top); ctx.lineTo(place(x), top + height); ctx.stroke();
    }
    if (scales.y.min > 0) {
      ctx.font = `${12 * ratio}px ${colour("--sans")}`;
      ctx.fillStyle = colour("--faint");
      ctx.textAlign = "left";
      ctx.fillText(`axis from ${tick(Number(scales.y.min.toPrecision(3)))}`, left + 6 * ratio, top + height - 7 * ratio);
    }
    ctx.restore();
  };
  keepDrawn(element, () => drawChart(element, {
    data: [xs, ...lines.map(({ values }) => values.map((value) => (isNumber(value) || value === undefined ? value : null)))],
    series: [{}, ...lines.map(({ label, values, stroke, width = 2, dash, points }) => {
      const shown = dash ? [] : pointsOf(values, points);
      return { label, stroke: () => colour(stroke), width, dash, points: { show: shown.length > 0, filter: () => shown, size: 6, fill: () => colour(stroke) } };
    })],
    axes: [{ incrs: roundSteps(1).filter((each) => across !== "step" || each >= 1), values: (_, ticks) => ticks.map(writeX), label: across, labelSize: 18, labelGap: 0, labelFont: `12px ${colour("--sans")}` },
      { incrs: roundSteps(1), values: (_, ticks) => ticks.map(tick) }],
    scales: {
      x: { range: (_, from, to) => (to - from < 6 && across === "step" ? [from - 0.5, to + 0.5] : [from, to > from ? to : from + 1]) },
      y: { range: (_, low, high) => {
        const slack = 0.06 * (high - low) || 0.05 * high || 1;
        return [fromZero || low < 0.5 * high ? Math.min(0, low) : low - slack, high + slack];
      } },
    },
    hooks: { drawAxes: [below] },
    tell: (index, x) => {
      const near = 8 * (element.chart.scales.x.max - element.chart.scales.x.min) / element.chart.over.clientWidth;
      return [`${across} ${writeX(xs[index])}`, [
        ...lines.filter(({ values, dash }) => values[index] !== undefined && values[index] !== null && !dash)
          .map(({ label, values }) => `${label} ${isNumber(values[index]) ? write(values[index]) : "not finite"}`),
        ...marks.filter((mark) => Math.abs(mark[0] - x) <= near).map((mark) => mark[1])]];
    },
  }));
}
