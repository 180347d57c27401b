// Charts of one run beside its timeline.
function drawMemory() {
  const element = document.querySelector('[data-chart="memory"]');
  const table = document.querySelector('[data-role="memory-table"]');
  const peak = trace.peaks.reduce((best, each) => (each.total > best.total ? each : best));
  let rank = trace.ranks.findIndex((each) => each.rank === peak.rank);
  let step = Math.floor((trace.steps.length - 1) / 2);
  // As what they come from is coloured in the timeline: optimizer state as the optimizer, what is gathered as all-gathers, ...
  const fill = (index) => `--m${[0, 2, 6, 1, 4, 3, 5, 7, 8][index]}`;
  const shown = trace.categories.map((_, index) => index).filter((index) =>
    trace.ranks.some((each) => each.samples.some((samples) => samples.some((sample) => sample[index + 1] > 0))));
  const highest = Math.max(...trace.peaks.map((each) => each.total));
  // A capacity far above would leave no room for what is below it.
  const isNear = trace.capacity && trace.capacity < 4 * highest;
  const top = isNear ? Math.max(highest, trace.capacity) : highest;

  function moments() {
    const own = trace.ranks[rank];
    const at = own.steps.findIndex(([number]) => number === trace.steps[step]);
    const [, start, end] = own.steps[at];
    const samples = own.samples[at].map(([time, ...nbytes]) => ({ time: Math.max(time - start, 0), nbytes, total: nbytes.reduce((a, b) => a + b, 0) }));
    return { samples, length: end - start };
  }
  function draw() {
    const { samples, length } = moments();
    const columns = [[...samples.map((sample) => sample.time), length].map((time) => time / 1e6)];
    let below = samples.map(() => 0);
    for (const index of shown) {
      below = below.map((sum, number) => sum + samples[number].nbytes[index]);
      columns.push([...below, below[below.length - 1]]);
    }
    const peakOfStep = samples.reduce((best, sample) => (sample.total > best.total ? sample : best));
    const stepped = uPlot.paths.stepped({ align: 1 });
    const unit = highest >= 2 ** 30 ? 2 ** 30 : highest >= 2 ** 20 ? 2 ** 20 : 2 ** 10;
    // What is lower is drawn later, over what is above: each column is a sum from zero on.
    drawChart(element, {
      height: 330, legend: false, data: [columns[0], ...columns.slice(1).reverse()],
      series: [{}, ...[...shown].reverse().map((index) => ({
        stroke: () => colour("--paper"), width: 0.6, fill: () => colour(fill(index)), paths: stepped, points: { show: false },
      }))],
      axes: [{ incrs: roundSteps(1), values: (_, ticks) => ticks.map((tick) => `${Number(tick.toPrecision(6))} ms`) },
        { incrs: roundSteps(unit), space: 60, values: (_, ticks) => ticks.map((tick) => (tick ? size(tick).replace(/\.0+(?= )/, "") : "0")) }],
      scales: { y: { range: [0, top * 1.06] } },
      hooks: { draw: [(chart) => { if (trace.capacity) markCapacity(chart); markPeak(chart, peakOfStep); }] },
      tell: (_, ms) => {
        const sample = samples.findLast(({ time }) => time <= ms * 1e6) || samples[0];
        return [`${size(sample.total)} at ${duration(ms * 1e6)}`, [...shown].reverse().filter((each) => sample.nbytes[each])
          .map((each) => `${trace.categories[each]}: ${size(sample.nbytes[each])}`)];
      },
    });
    fillTable(samples, peakOfStep);
  }
  function markCapacity({ ctx, bbox, valToPos }) {
    const ratio = uPlot.pxRatio, y = isNear ? valToPos(trace.capacity, "y", true) : bbox.top;
    ctx.save();
    ctx.font = `${12 * ratio}px ${colour("--sans")}`;
    ctx.fillStyle = ctx.strokeStyle = colour("--bad");
    ctx.lineWidth = 1.6 * ratio;
    ctx.setLineDash([6 * ratio, 4 * ratio]);
    if (isNear) { ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke(); }
    ctx.textAlign = "right";
    ctx.textBaseline = "bottom";
    ctx.fillText(`${isNear ? "" : "far below the "}capacity ${size(trace.capacity)}`, bbox.left + bbox.width - 4 * ratio, y - 2 * ratio);
    ctx.restore();
  }
  function markPeak({ ctx, bbox, valToPos }, { time, total }) {
    const ratio = uPlot.pxRatio, x = valToPos(time / 1e6, "x", true), y = valToPos(total, "y", true);
    if (x < bbox.left || x > bbox.left + bbox.width) return;
    ctx.save();
    ctx.font = `${12 * ratio}px ${colour("--sans")}`;
    ctx.fillStyle = colour("--ink");
    ctx.strokeStyle = colour("--paper");
    ctx.lineWidth = 4 * ratio;
    ctx.lineJoin = "round";
    ctx.textAlign = "left";
    const text = `peak ${size(total)} at ${duration(time)}`;
    const label = [text, Math.min(x + 9 * ratio, bbox.left + bbox.width - ctx.measureText(text).width), y - 7 * ratio];
    ctx.strokeText(...label);
    ctx.fillText(...label);
    ctx.beginPath();
    ctx.arc(x, y, 4 * ratio, 0, 2 * Math.PI);
    ctx.fill();
    ctx.restore();
  }
  function fillTable(samples, top) {
    const least = samples.reduce((best, sample) => (sample.total < best.total ? sample : best));
    const body = [...shown].reverse().map((index) => [trace.categories[index], `var(${fill(index)})`, top.nbytes[index], least.nbytes[index]]);
    body.push(["total", "", top.total, least.total]);
    const head = [["Category", ""], ["At the peak", "number"], ["At the least", "number"]];
    table.replaceChildren(made("table", {},
      made("thead", {}, made("tr", {}, ...head.map(([label, className]) => made("th", { className }, label)))),
      made("tbody", {}, ...body.map(([label, fill, ...values]) => made("tr", { className: fill ? "" : "total" },
        made("th", {}, ...(fill ? [made("i", { className: "swatch", style: `background: ${fill}` })] : []), label),
        ...values.map((value) => made("td", { className: "number" }, value ? size(value) : "–")))))));
  }
  const most = 16;
  choices("memory-steps", trace.steps.map((number) => `step ${number}`), step, (index) => { step = index; draw(); });
  choices("memory-ranks", trace.ranks.slice(0, most).map((each) => `rank ${each.rank}`), rank, (index) => { rank = index; draw(); });
  keepDrawn(element, draw);
}

/** Shows a part's label whole, or its share alone, or nothing: never a piece of it. */
function fitParts(stack) {
  const parts = [...stack.querySelectorAll(".part")].map((part) => [part, part.textContent]);
  keepDrawn(stack, () => {
    for (const [part, label] of parts) {
      part.style.color = onColour(colour(kindVariable(part.dataset.kind)));
      const share = label.slice(label.lastIndexOf(" ", label.length - 3) + 1);
      part.textContent = [label, share, ""].find((text) => {
        part.textContent = text;
        return part.scrollWidth <= part.clientWidth;
      }) ?? "";
    }
  });
}

if (trace) {
  document.querySelectorAll(".stack").forEach(fitParts);
  drawMemory();
}
if (data.series) {
  const { steps, loss, loss_mean: lossMean, speed, norm, norm_mean: normMean, lr, val, entropy, traced, not_finite: bad, resumes } = data.series;
  const exact = (value) => String(Number(value.toPrecision(3)));
  const level = (label, value, stroke) => ({ label, values: steps.map(() => value), stroke, width: 1.4, dash: [5, 4] });
  const each = (values, label = "each step") => ({ label, values, stroke: "--forward", width: 1 });
  const mean = (values) => ({ label: "running mean", values, stroke: "--backward", width: 2.4 });
  const shared = { band: traced, marks: [
    ...bad.map(([step, what]) => [step, `not finite: ${what}`, "--barrier"]),
    ...resumes.map(({ step, changed }) => [step + 0.5, `resumed${changed ? `: ${changed}` : ""}`, "--ink", true]),
  ] };
  const held = new Map(val);
  drawLines("loss", steps, [
    each(loss), mean(lossMean),
    ...(val.length ? [{ label: "held out", values: steps.map((step) => held.get(step)), stroke: "--optimizer", points: true }] : []),
    ...(entropy ? [level(`unigram entropy ${entropy.toFixed(2)}`, entropy, "--barrier")] : []),
  ], { ...shared, write: (value) => value.toFixed(4), fromZero: false });
  const sorted = (speed.length > 1 ? speed.slice(1) : [...speed]).sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  const median = sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
  drawLines("speed", steps, [each(speed), level(`median ${count(median)}`, median, "--backward")], shared);
  if (norm) drawLines("norm", steps, [each(norm), mean(normMean)], { ...shared, write: exact });
  if (lr) drawLines("lr", steps, [each(lr)], { ...shared, write: exact });
}
