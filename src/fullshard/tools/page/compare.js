// Lines of several runs in one frame, over steps, tokens or time.
const exact = (value) => value.toLocaleString("en-US", { maximumSignificantDigits: 4 });
const lines = {
  loss: ({ loss_mean: mean }) => mean,
  val: ({ steps, val }) => { const held = new Map(val); return steps.map((step) => held.get(step)); },
  speed: ({ speed }) => speed.map((value, index) => (index ? value : undefined)),
  norm: ({ norm, norm_mean: mean }) => norm && mean,
};
const runs = data.runs.map((run, index) => ({ ...run, stroke: `--m${index}` })).filter((run) => run.series);
const longest = Math.max(...runs.map(({ series }) => series.elapsed?.at(-1) || 0));
const [unit, second] = longest >= 7200 ? ["hours", 3600] : longest >= 180 ? ["minutes", 60] : ["seconds", 1];
const amount = data.units.join(" or ");
const axes = [["steps", "step", ({ steps }) => steps], [amount, amount, ({ tokens }) => tokens],
  ["time", unit, ({ elapsed }) => elapsed?.map((each) => each / second)]].filter(([, , of]) => runs.length && runs.every(({ series }) => of(series)));
function draw(chosen) {
  const [, across, of] = axes[chosen];
  for (const [name, lineOf] of Object.entries(lines)) {
    const drawn = runs.map((run) => ({ ...run, xs: of(run.series), values: lineOf(run.series) }))
      .filter(({ values }) => values?.some((value) => value !== undefined));
    document.querySelector(`section:has([data-chart="${name}"])`).hidden = !drawn.length;
    if (!drawn.length) continue;
    const [xs, ...values] = uPlot.join(drawn.map((run) => [run.xs, run.values]));
    drawLines(name, xs, drawn.map((run, index) => ({ label: run.name, values: values[index], stroke: run.stroke, points: name === "val" })), {
      write: exact, across, writeX: tick, fromZero: name === "speed" || name === "norm",
      marks: drawn.flatMap(({ name: run, series, xs: own, stroke }) => series.resumes.map(({ step, changed }) =>
        [own[series.steps.indexOf(step)], `${run} resumed${changed ? `: ${changed}` : ""}`, stroke, true])),
    });
  }
}
choices("across", axes.map(([label]) => label), 0, (index) => { keep.zoom = {}; draw(index); });
draw(keep.pressed.across || 0);
