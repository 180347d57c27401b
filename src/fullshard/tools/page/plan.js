// Alternatives to a plan: memory and time of each, to click through.
function drawAlternatives() {
  const picture = document.querySelector("#alternatives svg"), element = picture.parentElement;
  const points = data.plan.alternatives, details = [...document.querySelectorAll("[data-alternative]")];
  const byTime = [...points.keys()].sort((a, b) => points[a].step_ns - points[b].step_ns);
  let chosen = 0;

  const svg = (tag, attributes, ...parts) => {
    const node = document.createElementNS(picture.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...parts);
    return node;
  };
  /** Places values of an axis between two pixels. by: Math.log where they are far apart. */
  function axis(values, from, to, by = (value) => value) {
    const least = Math.min(...values), most = Math.max(...values);
    const slack = 0.05 * (by(most) - by(least)) || 0.1 * Math.abs(by(most)) || 1;
    const low = by(least) - slack, high = by(most) + slack;
    return { least, most, at: (value) => from + ((by(value) - low) / (high - low)) * (to - from) };
  }
  const times = points.map((each) => each.step_ns), isFar = Math.max(...times) > 4 * Math.min(...times);

  function choose(number) {
    chosen = number;
    details.forEach((each) => { each.hidden = Number(each.dataset.alternative) !== number; });
    document.querySelectorAll("[data-choose]").forEach((each) => { each.ariaPressed = String(Number(each.dataset.choose) === number); });
    draw();
  }
  function draw() {
    const width = Math.max(element.clientWidth, 200), height = 360, left = 66, right = width - 12, top = 12, bottom = height - 40;
    const { capacity } = data.trace;
    const x = axis([...points.map(({ nbytes }) => nbytes), capacity], left, right), y = axis(times, bottom, top, isFar ? Math.log : undefined);
    const one = [2 ** 30, 2 ** 20, 2 ** 10].find((each) => x.most >= each) || 1, second = y.most >= 1e9 ? 1e9 : 1e6;
    const lines = [];
    for (const value of ticks(x.least / one, x.most / one, Math.max(2, width / 110)).map((each) => each * one)) {
      lines.push(svg("line", { x1: x.at(value), x2: x.at(value), y1: top, y2: bottom, class: "grid" }),
        svg("text", { x: x.at(value), y: bottom + 17, "text-anchor": "middle" }, size(value).replace(/\.0+(?= )/, "")));
    }
    const steps = isFar ? roundSteps(1) : ticks(y.least / second, y.most / second, 6).map((each) => each * second);
    for (const value of steps.filter((each) => each >= y.least && each <= y.most)) {
      lines.push(svg("line", { x1: left, x2: right, y1: y.at(value), y2: y.at(value), class: "grid" }),
        svg("text", { x: left - 8, y: y.at(value) + 4, "text-anchor": "end" }, duration(value).replace(/\.?0+(?= )/, "")));
    }
    lines.push(svg("line", { x1: x.at(capacity), x2: x.at(capacity), y1: top, y2: bottom, class: "capacity" }),
      svg("text", { x: left, y: height - 6 }, "memory of a rank at the peak"));
    const circles = points.map((each, number) => svg("circle", {
      cx: x.at(each.nbytes), cy: y.at(each.step_ns), r: number === chosen ? 8 : 5,
      class: `point${each.is_front ? " front" : ""}${each.fits ? "" : " big"}${number === chosen ? " chosen" : ""}`,
    }));
    circles.push(circles.splice(chosen, 1)[0]); // over the others
    const { name, nbytes, step_ns: ns } = points[chosen];
    const label = `${points.length} alternatives by memory and time. Chosen: ${name}, ${duration(ns)}, ${size(nbytes)}`;
    for (const [key, value] of Object.entries({ width, height, "aria-label": label })) picture.setAttribute(key, value);
    picture.replaceChildren(...lines, ...circles);
    picture.nearest = (event) => {
      const box = picture.getBoundingClientRect();
      const far = (each) => Math.hypot(x.at(each.nbytes) - event.clientX + box.left, y.at(each.step_ns) - event.clientY + box.top);
      const found = points.reduce((best, each, number) => (far(each) < far(points[best]) ? number : best), 0);
      return far(points[found]) < 24 ? found : -1;
    };
  }
  keepDrawn(element, draw);
  picture.addEventListener("click", (event) => { const found = picture.nearest(event); if (found >= 0) choose(found); });
  picture.addEventListener("pointermove", (event) => {
    const found = points[picture.nearest(event)];
    if (found) showTip(event, found.name, [`${duration(found.step_ns)} a step`, `${size(found.nbytes)}${found.fits ? "" : ": does not fit"}`]);
    else hideTip();
  });
  picture.addEventListener("pointerleave", hideTip);
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(byTime[(byTime.indexOf(chosen) + step + points.length) % points.length]);
  });
  document.querySelectorAll("[data-choose]").forEach((each) => { each.onclick = () => choose(Number(each.dataset.choose)); });
  choose(chosen);
}
if (data.plan?.alternatives.length) drawAlternatives();
