// Lines of several runs in one frame.
const exact = (value) => value.toLocaleString("en-US", { maximumSignificantDigits: 4 });
const lines = {
  loss: (series) => [series.steps, series.loss_mean],
  val: (series) => [series.val.map(([step]) => step), series.val.map(([, value]) => value)],
  speed: (series) => [series.steps.slice(1), series.speed.slice(1)],
  norm: (series) => (series.norm ? [series.steps, series.norm_mean] : [[], []]),
};
for (const [name, lineOf] of Object.entries(lines)) {
  const all = data.runs.map((run) => (run.series ? lineOf(run.series) : [[], []]));
  if (all.every(([steps]) => !steps.length)) {
    document.querySelector(`[data-chart="${name}"]`).textContent = "None of these runs has measured it.";
    continue;
  }
  const [steps, ...values] = uPlot.join(all);
  drawLines(name, steps, data.runs.map((run, index) => (
    { label: run.name, values: values[index], stroke: `--m${index}`, points: all[index][0].length === 1 || name === "val" }
  )), { write: exact });
}
