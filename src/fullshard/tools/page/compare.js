// Lines of several runs in one frame.
const lines = {
  loss: (series) => smoothed(series, series.loss),
  val: (series) => series.val,
  speed: (series) => series.steps.slice(1).map((step, index) => [step, series.speed[index + 1]]),
  norm: (series) => (series.norm ? smoothed(series, series.norm) : []),
};

function smoothed(series, values) {
  const mean = runningMean(values);
  return series.steps.map((step, index) => [step, mean[index]]);
}

function drawRuns(name) {
  const element = document.querySelector(`[data-chart="${name}"]`);
  const all = data.runs.map((run) => (run.series ? lines[name](run.series) : []));
  const known = all.flat().filter(([, value]) => Number.isFinite(value));
  if (!all.flat().length) {
    element.textContent = "None of these runs has measured it.";
    return;
  }
  keepDrawn(element, () => {
    const { root, width, height } = frame(element, 270);
    const left = 64, right = 14, top = 14, bottom = 40;
    const high = extent(known.map(([, value]) => value))[1] * 1.05 || 1;
    const [from, last] = extent(all.flat().map(([step]) => step)), to = Math.max(last, from + 1);
    const x = (step) => left + ((step - from) / (to - from)) * (width - left - right);
    const y = (value) => height - bottom - (value / high) * (height - top - bottom);
    for (const tick of ticks(0, high, 5)) {
      root.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: Math.round(y(tick)), y2: Math.round(y(tick)) }));
      root.append(svg("text", { x: left - 10, y: y(tick) + 4, "text-anchor": "end" }, tick.toLocaleString("en-US")));
    }
    for (const tick of ticks(from, to, Math.max(3, Math.floor((width - left) / 90))).filter(Number.isInteger)) {
      root.append(svg("text", { x: x(tick), y: height - 20, "text-anchor": "middle" }, count(tick)));
    }
    root.append(svg("text", { x: left + (width - left - right) / 2, y: height - 3, "text-anchor": "middle" }, "step"));
    all.forEach((points, index) => {
      const place = ([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`;
      const stroke = `var(--m${index})`;
      for (const part of unbroken(points)) {
        if (part.length === 1) root.append(svg("circle", { cx: x(part[0][0]), cy: y(part[0][1]), r: 3.5, fill: stroke }));
        root.append(svg("polyline", { points: part.map(place).join(" "), fill: "none", stroke, "stroke-width": 2, "stroke-linejoin": "round" }));
      }
    });
    root.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
    root.addEventListener("pointermove", (event) => {
      const share = (event.clientX - root.getBoundingClientRect().left - left) / (width - left - right);
      const wanted = from + share * (to - from);
      const near = (points) => points.reduce((best, point) => (Math.abs(point[0] - wanted) < Math.abs(best[0] - wanted) ? point : best));
      const shown = data.runs.map((run, index) => [run.name, all[index]]).filter(([, points]) => points.length);
      showTip(event, `about step ${count(Math.max(from, Math.min(to, Math.round(wanted))))}`,
        shown.map(([own, points]) => { const [step, value] = near(points); return `${own}: ${rounded(value, (each) => Number(each.toPrecision(4)))} (step ${step})`; }));
    });
    root.addEventListener("pointerleave", hideTip);
  });
}

for (const name of Object.keys(lines)) drawRuns(name);
