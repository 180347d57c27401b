// Bars, areas and lines as SVG.
function drawUnits() {
  const element = document.querySelector('[data-chart="units"]');
  const units = trace.units;
  keepDrawn(element, () => {
    const ROW = 26, longest = Math.max(...units.map((unit) => unit.name.length));
    const left = Math.min(Math.max(60, longest * 7.4 + 14), element.clientWidth * 0.32), right = 74;
    const { root, width } = frame(element, units.length * ROW + 24);
    const most = Math.max(...units.map((unit) => unit.exposed_ns)) || 1;
    const scale = (width - left - right) / most;
    for (const tick of ticks(0, most / 1e6, Math.max(2, Math.floor((width - left - right) / 130)))) {
      const x = Math.round(left + tick * 1e6 * scale);
      root.append(svg("line", { class: "grid", x1: x, x2: x, y1: 18, y2: units.length * ROW + 22 }));
      root.append(svg("text", { x, y: 11, "text-anchor": "middle" }, `${Number(tick.toPrecision(6))} ms`));
    }
    units.forEach((unit, index) => {
      const y = 24 + index * ROW;
      const group = svg("g", {});
      const room = Math.floor((left - 14) / 7.2);
      const parts = unit.name.split(".");
      while (parts.length > 1 && parts.join(".").length > room) parts.shift(); // whole words; the tip has all
      const name = parts.join(".");
      group.append(svg("rect", { x: 0, y, width, height: ROW, fill: "transparent" }));
      group.append(svg("text", { class: "strong", x: left - 10, y: y + 16, "text-anchor": "end" }, name));
      group.append(svg("rect", { x: left, y: y + 4, width: unit.gather_ns * scale, height: ROW - 8, fill: "var(--all-gather)" }));
      group.append(svg("rect", { x: left + unit.gather_ns * scale, y: y + 4, width: unit.reduce_ns * scale, height: ROW - 8, fill: "var(--reduce-scatter)" }));
      group.append(svg("text", { x: left + unit.exposed_ns * scale + 8, y: y + 16 }, duration(unit.exposed_ns)));
      group.addEventListener("pointermove", (event) => showTip(event, unit.name, [
        `all-gather: ${duration(unit.gather_ns)} exposed, ${three(unit.num_gathers)} a step, ${size(unit.gather_nbytes)}`,
        `reduce-scatter: ${duration(unit.reduce_ns)} exposed, ${three(unit.num_reduces)} a step, ${size(unit.reduce_nbytes)}`,
        `in flight: ${duration(unit.in_flight_ns)}`,
      ]));
      group.addEventListener("pointerleave", hideTip);
      root.append(group);
    });
    root.append(svg("line", { class: "axis", x1: left, x2: left, y1: 18, y2: units.length * ROW + 22 }));
  });
}

function drawMemory() {
  const element = document.querySelector('[data-chart="memory"]');
  const table = document.querySelector('[data-role="memory-table"]');
  const peak = trace.peaks.reduce((best, each) => (each.total > best.total ? each : best));
  let rank = trace.ranks.findIndex((each) => each.rank === peak.rank);
  let step = Math.floor((trace.steps.length - 1) / 2);
  const shown = trace.categories.map((_, index) => index).filter((index) =>
    trace.ranks.some((each) => each.samples.some((samples) => samples.some((sample) => sample[index + 1] > 0))));
  const highest = Math.max(...trace.peaks.map((each) => each.total));

  function window_() {
    const own = trace.ranks[rank];
    const at = own.steps.findIndex(([number]) => number === trace.steps[step]);
    const [, start, end] = own.steps[at];
    const samples = own.samples[at].map(([time, ...nbytes]) => ({ time: Math.max(time - start, 0), nbytes, total: nbytes.reduce((a, b) => a + b, 0) }));
    return { samples, length: end - start };
  }
  function draw() {
    const { samples, length } = window_();
    const { root, width, height } = frame(element, 330);
    const left = 66, right = 12, top = 26, bottom = 30;
    const x = (time) => left + (time / length) * (width - left - right);
    const y = (nbytes) => height - bottom - (nbytes / (highest * 1.06)) * (height - top - bottom);
    for (const tick of byteTicks(highest * 1.06, 5)) {
      root.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: Math.round(y(tick)), y2: Math.round(y(tick)) }));
      root.append(svg("text", { x: left - 10, y: y(tick) + 4, "text-anchor": "end" }, tick ? size(tick).replace(/\.0+(?= )/, "") : "0"));
    }
    for (const tick of ticks(0, length / 1e6, Math.max(3, Math.floor((width - left) / 110)))) {
      root.append(svg("text", { x: Math.min(x(tick * 1e6), width - right - 16), y: height - 8, "text-anchor": "middle" }, `${Number(tick.toPrecision(6))} ms`));
    }
    const base = samples.map(() => 0);
    for (const index of shown) {
      const up = [], down = [];
      samples.forEach((sample, number) => {
        const until = number + 1 < samples.length ? samples[number + 1].time : length;
        const from = y(base[number] + sample.nbytes[index]), to = y(base[number]);
        up.push(`${x(sample.time)},${from}`, `${x(until)},${from}`);
        down.unshift(`${x(until)},${to}`, `${x(sample.time)},${to}`);
        base[number] += sample.nbytes[index];
      });
      root.append(svg("polygon", { points: [...up, ...down].join(" "), fill: `var(--m${index})`, stroke: "var(--paper)", "stroke-width": 0.6 }));
    }
    const top_ = samples.reduce((best, sample) => (sample.total > best.total ? sample : best));
    const at = x(top_.time), isRight = at > width - 190;
    root.append(svg("circle", { cx: at, cy: y(top_.total), r: 4, fill: "var(--ink)", stroke: "var(--paper)", "stroke-width": 1.5 }));
    root.append(svg("text", { class: "strong halo", x: isRight ? at - 9 : at + 9, y: y(top_.total) - 7, "text-anchor": isRight ? "end" : "start" },
      `peak ${size(top_.total)} at ${duration(top_.time)}`));
    root.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
    const cursor = svg("line", { class: "axis", y1: top, y2: height - bottom, visibility: "hidden" });
    root.append(cursor);
    root.addEventListener("pointermove", (event) => {
      const time = ((event.clientX - root.getBoundingClientRect().left - left) / (width - left - right)) * length;
      const sample = [...samples].reverse().find((each) => each.time <= time) || samples[0];
      cursor.setAttribute("x1", x(Math.min(Math.max(time, 0), length)));
      cursor.setAttribute("x2", x(Math.min(Math.max(time, 0), length)));
      cursor.setAttribute("visibility", "visible");
      showTip(event, `${size(sample.total)} at ${duration(Math.max(time, 0))}`,
        [...shown].reverse().filter((index) => sample.nbytes[index]).map((index) => `${trace.categories[index]}: ${size(sample.nbytes[index])}`));
    });
    root.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); hideTip(); });
    fillTable(samples, top_);
  }
  function fillTable(samples, top_) {
    const least = samples.reduce((best, sample) => (sample.total < best.total ? sample : best));
    const body = [...shown].reverse().map((index) => [trace.categories[index], `var(--m${index})`, top_.nbytes[index], least.nbytes[index]]);
    body.push(["total", "", top_.total, least.total]);
    const made = document.createElement("table");
    const head = made.createTHead().insertRow();
    for (const [label, isNumber] of [["Category", false], ["At the peak", true], ["At the least", true]]) {
      const cell = document.createElement("th");
      cell.textContent = label;
      if (isNumber) cell.className = "number";
      head.append(cell);
    }
    const rows = made.createTBody();
    for (const [label, fill, atPeak, atLeast] of body) {
      const row = rows.insertRow();
      const name = document.createElement("th");
      if (fill) {
        const swatch = document.createElement("i");
        swatch.className = "swatch";
        swatch.style.background = fill;
        name.append(swatch);
      } else row.className = "total";
      name.append(label);
      row.append(name);
      for (const value of [atPeak, atLeast]) {
        const cell = row.insertCell();
        cell.className = "number";
        cell.textContent = value ? size(value) : "–";
      }
    }
    table.replaceChildren(made);
  }
  const most = 16;
  choices("memory-steps", trace.steps.map((number) => `step ${number}`), step, (index) => { step = index; draw(); });
  choices("memory-ranks", trace.ranks.slice(0, most).map((each) => `rank ${each.rank}`), rank, (index) => { rank = index; draw(); });
  keepDrawn(element, draw);
}

function drawLine(name, values, options) {
  const element = document.querySelector(`[data-chart="${name}"]`);
  const { steps, traced } = data.series;
  keepDrawn(element, () => {
    const { root, width, height } = frame(element, 270);
    const left = options.left, right = 14, top = 14, bottom = 40;
    const known = [...values, ...(options.level ? [options.level.value] : []), ...(options.points || []).map(([, value]) => value)];
    const high = Math.max(extent(known)[1], 0) * 1.05 || 1, low = 0;
    const from = steps[0], to = Math.max(steps[steps.length - 1], from + 1);
    const x = (step) => left + ((step - from) / (to - from)) * (width - left - right);
    const y = (value) => height - bottom - ((value - low) / (high - low)) * (height - top - bottom);
    for (const tick of ticks(low, high, 5)) {
      root.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: Math.round(y(tick)), y2: Math.round(y(tick)) }));
      root.append(svg("text", { x: left - 10, y: y(tick) + 4, "text-anchor": "end" }, options.tick(tick)));
    }
    for (const tick of ticks(from, to, Math.max(3, Math.floor((width - left) / 90))).filter(Number.isInteger)) {
      root.append(svg("text", { x: x(tick), y: height - 20, "text-anchor": "middle" }, count(tick)));
    }
    root.append(svg("text", { x: left + (width - left - right) / 2, y: height - 3, "text-anchor": "middle" }, "step"));
    if (traced) {
      const begin = Math.max(x(traced[0] - 0.5), left), end = Math.min(x(traced[1] + 0.5), width - right);
      root.append(svg("rect", { x: begin, y: top, width: Math.max(end - begin, 2), height: height - top - bottom, fill: "var(--faint)", opacity: 0.16 }));
    }
    for (const [step] of data.series.not_finite) root.append(svg("line", { class: "bad", x1: x(step), x2: x(step), y1: top, y2: height - bottom }));
    const path = (series) => unbroken(series.map((value, index) => [steps[index], value]))
      .map((part) => part.map(([step, value], index) => `${index ? "L" : "M"}${x(step).toFixed(1)},${y(value).toFixed(1)}`).join("")).join("");
    root.append(svg("path", { d: path(values), fill: "none", stroke: "var(--forward)", "stroke-width": options.line ? 1.2 : 1, opacity: 0.85 }));
    if (options.smooth) root.append(svg("path", { d: path(options.smooth), fill: "none", stroke: "var(--backward)", "stroke-width": 2.4, "stroke-linejoin": "round" }));
    if (options.points && options.points.length) {
      const place = ([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`;
      const parts = unbroken(options.points);
      for (const part of parts) root.append(svg("polyline", { points: part.map(place).join(" "), fill: "none", stroke: "var(--optimizer)", "stroke-width": 2 }));
      for (const [step, value] of parts.flat()) root.append(svg("circle", { cx: x(step), cy: y(value), r: 2.6, fill: "var(--optimizer)" }));
    }
    if (options.level) {
      const at = y(options.level.value);
      root.append(svg("line", { x1: left, x2: width - right, y1: at, y2: at, stroke: options.level.stroke, "stroke-width": 1.4, "stroke-dasharray": "5 4" }));
    }
    root.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
    const dot = svg("circle", { r: 4, fill: "var(--ink)", stroke: "var(--paper)", "stroke-width": 1.5, visibility: "hidden" });
    root.append(dot);
    root.addEventListener("pointermove", (event) => {
      const share = (event.clientX - root.getBoundingClientRect().left - left) / (width - left - right);
      const wanted = from + share * (to - from);
      const index = steps.reduce((best, step, number) => (Math.abs(step - wanted) < Math.abs(steps[best] - wanted) ? number : best), 0);
      dot.setAttribute("cx", x(steps[index]));
      if (Number.isFinite(values[index])) dot.setAttribute("cy", y(values[index]));
      dot.setAttribute("visibility", Number.isFinite(values[index]) ? "visible" : "hidden");
      showTip(event, `step ${steps[index]}`, options.tip(index));
    });
    root.addEventListener("pointerleave", () => { dot.setAttribute("visibility", "hidden"); hideTip(); });
  });
}

/** Shows a part's label whole, or its share alone, or nothing: never a piece of it. */
function fitParts() {
  const parts = [...document.querySelectorAll(".stack .part")].map((part) => [part, part.textContent]);
  keepDrawn(document.querySelector(".stack"), () => {
    for (const [part, label] of parts) {
      const share = label.slice(label.lastIndexOf(" ", label.length - 3) + 1);
      part.textContent = [label, share, ""].find((text) => {
        part.textContent = text;
        return part.scrollWidth <= part.clientWidth;
      }) ?? "";
    }
  });
}

if (trace) {
  fitParts();
  drawUnits();
  drawMemory();
}
if (data.series) {
  const { loss, speed, norm, lr, val, entropy } = data.series;
  const held = new Map(val);
  const exact = (value) => rounded(value, (each) => String(Number(each.toPrecision(3))));
  const four = (value) => rounded(value, (each) => each.toFixed(4));
  const smooth = runningMean(loss);
  drawLine("loss", loss, {
    left: 44, smooth, points: val, tick: (value) => String(Number(value.toPrecision(6))),
    level: entropy ? { value: entropy, stroke: "var(--fence)" } : null,
    tip: (index) => [
      `loss ${four(loss[index])}`, `running mean ${four(smooth[index])}`,
      ...(held.has(data.series.steps[index]) ? [`held out ${four(held.get(data.series.steps[index]))}`] : []),
    ],
  });
  const sorted = [...(speed.length > 1 ? speed.slice(1) : speed)].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  const median = sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
  drawLine("speed", speed, {
    left: 60, line: true, tick: count, level: { value: median, stroke: "var(--backward)" },
    tip: (index) => [`${count(speed[index])} tokens/s`, `median ${count(median)}`],
  });
  if (norm) {
    const mean = runningMean(norm);
    drawLine("norm", norm, {
      left: 56, smooth: mean, tick: exact, level: null,
      tip: (index) => [`norm ${exact(norm[index])}`, `running mean ${exact(mean[index])}`],
    });
  }
  if (lr) drawLine("lr", lr, { left: 64, line: true, tick: exact, level: null, tip: (index) => [exact(lr[index])] });
}
