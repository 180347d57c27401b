// The timeline of every rank, on a canvas: there may be tens of thousands of spans.
function drawTimeline() {
  const canvas = document.querySelector("#timeline canvas");
  const context = canvas.getContext("2d");
  const RANKS_A_PAGE = 8, ROW = 24, GAP = 3, RANK_GAP = 18, TOP = 26, MOST_ROWS = 3;
  const communication = new Set(trace.communication);
  const all = trace.ranks;
  const whole = [Math.min(...all.map((rank) => rank.steps[0][1])), Math.max(...all.map((rank) => rank.steps[rank.steps.length - 1][2]))];
  let page = 0, home = whole, view = whole, tracks = [], dragged = null, gutter = 0, width = 0;

  const boundsOf = (number) => {
    const found = all.flatMap((rank) => rank.steps.filter((step) => step[0] === number));
    return [Math.min(...found.map((step) => step[1])), Math.max(...found.map((step) => step[2]))];
  };

  /** Rows of spans [kind, unit, start, end, nbytes?], each with its label. */
  function layOut() {
    tracks = [];
    let y = TOP;
    for (const rank of all.slice(page * RANKS_A_PAGE, (page + 1) * RANKS_A_PAGE)) {
      const add = (label, spans, isFirst) => {
        tracks.push({ rank, label, spans, y, isFirst });
        y += ROW + GAP;
      };
      const named = rank.timeline.map(([kind, ...rest]) => [trace.kinds[kind], ...rest]);
      add("compute", named.filter(([kind]) => !communication.has(kind)), true);
      add("exposed", named.filter(([kind]) => communication.has(kind)), false);
      for (const lane of rank.lanes) {
        lane.rows.slice(0, MOST_ROWS).forEach((row, number) => {
          add(number ? "" : lane.kind, row.map((span) => [lane.kind, ...span]), false);
        });
      }
      y += RANK_GAP;
    }
    return y - RANK_GAP + 2;
  }

  const x = (time) => gutter + ((time - view[0]) / (view[1] - view[0])) * (width - gutter);
  const timeAt = (pixel) => view[0] + ((pixel - gutter) / (width - gutter)) * (view[1] - view[0]);
  /** The first span that ends after a time. */
  function firstAfter(spans, time) {
    let low = 0, high = spans.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[middle][3] <= time) low = middle + 1; else high = middle;
    }
    return low;
  }

  function draw() {
    const height = layOut();
    const ratio = Math.max(window.devicePixelRatio || 1, 2); // prints well too
    width = canvas.parentElement.clientWidth;
    gutter = width < 640 ? 106 : 118;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const ink = colour("--ink"), soft = colour("--soft"), faint = colour("--faint"), rule = colour("--rule"), wash = colour("--wash");
    const sans = colour("--sans");
    const kinds = Object.fromEntries(trace.kinds.map((kind) => [kind, colour(kindVariable(kind))]));
    context.textBaseline = "middle";

    context.font = `12px ${sans}`;
    const origin = home === whole ? whole[0] : home[0];
    for (const tick of ticks((view[0] - origin) / 1e6, (view[1] - origin) / 1e6, Math.max(3, Math.floor((width - gutter) / 110)))) {
      const at = Math.round(x(tick * 1e6 + origin)) + 0.5;
      context.strokeStyle = rule;
      context.beginPath(); context.moveTo(at, 19); context.lineTo(at, height); context.stroke();
      context.fillStyle = faint;
      const label = `${Number(tick.toPrecision(10)).toLocaleString("en-US", { maximumFractionDigits: 4 })} ms`;
      const wide = context.measureText(label).width;
      context.textAlign = "left";
      context.fillText(label, Math.min(Math.max(at - wide / 2, gutter), width - wide), 10);
    }

    for (const track of tracks) {
      context.fillStyle = wash;
      context.fillRect(gutter, track.y, width - gutter, ROW);
      context.textAlign = "left";
      if (track.isFirst && tracks.indexOf(track)) {
        context.strokeStyle = rule;
        const above = Math.round(track.y - RANK_GAP / 2) - 1.5;
        context.beginPath(); context.moveTo(0, above); context.lineTo(width, above); context.stroke();
      }
      let free = gutter - 10;
      if (track.isFirst) {
        context.font = `600 12.5px ${sans}`;
        context.fillStyle = ink;
        const name = `rank ${track.rank.rank}`;
        context.fillText(name, 0, track.y + ROW / 2);
        free -= context.measureText(name).width + 8;
      }
      context.font = `12px ${sans}`;
      context.fillStyle = soft;
      context.textAlign = "right";
      if (context.measureText(track.label).width <= free) context.fillText(track.label, gutter - 10, track.y + ROW / 2);
      context.save();
      context.beginPath(); context.rect(gutter, 0, width - gutter, height); context.clip();
      context.textAlign = "center";
      let blurred = -1; // the last pixel that a span too narrow to see has filled
      for (let index = firstAfter(track.spans, view[0]); index < track.spans.length; index++) {
        const [kind, unit, start, end] = track.spans[index];
        if (start >= view[1]) break;
        const left = x(start), right = x(end);
        if (kind === "other" || right - left < 0.4) {
          if (kind === "other" && right - left < 1) continue;
          if (kind !== "other" && Math.floor(left) === blurred) continue;
          blurred = Math.floor(left);
        }
        const wide = Math.max(right - left - (right - left > 4 ? 1 : 0), 0.8);
        context.fillStyle = kinds[kind];
        context.fillRect(left, track.y, wide, ROW);
        const name = unit >= 0 ? trace.names[unit] : kind;
        if (wide > 18) {
          const from = Math.max(left, gutter), room = Math.min(right, width) - from - 8;
          const text = fitting(name, room);
          if (text) {
            context.fillStyle = onColour(kinds[kind]);
            context.fillText(text, from + (room + 8) / 2, track.y + ROW / 2 + 0.5);
          }
        }
      }
      context.restore();
    }
    context.strokeStyle = faint;
    context.setLineDash([3, 3]);
    for (const [, , end] of all[0].steps.slice(0, -1)) {
      if (end > view[0] && end < view[1]) {
        const at = Math.round(x(end)) + 0.5;
        context.beginPath(); context.moveTo(at, 19); context.lineTo(at, height); context.stroke();
      }
    }
    context.setLineDash([]);
    if (dragged && !dragged.moves) {
      context.fillStyle = colour("--accent");
      context.globalAlpha = 0.18;
      context.fillRect(Math.min(dragged.from, dragged.to), TOP - 4, Math.abs(dragged.to - dragged.from), height);
      context.globalAlpha = 1;
    }
  }

  /** As much of a unit's name as there is room for, its end first, without what all begin with: `layers.3`, `3`. */
  const begins = new Set(trace.names.filter((name) => name !== "(root)").map((name) => name.split(".")[0]));
  function fitting(name, room) {
    const parts = name.split(".");
    for (let from = parts.length > 1 && begins.size === 1 ? 1 : 0; from < parts.length; from++) {
      const text = parts.slice(from).join(".");
      if (context.measureText(text).width <= room) return text;
    }
    return "";
  }

  function show(from, to) {
    const least = 2000; // nanoseconds
    let span = Math.min(Math.max(to - from, least), whole[1] - whole[0]);
    const start = Math.min(Math.max(from, whole[0]), whole[1] - span);
    view = keep.zoom.timeline = [start, start + span];
    draw();
  }
  const zoom = (factor, around = (view[0] + view[1]) / 2) =>
    show(around - (around - view[0]) * factor, around + (view[1] - around) * factor);
  const move = (part) => { const by = part * (view[1] - view[0]); show(view[0] + by, view[1] + by); };
  const goHome = () => show(...home);

  function spanAt(event) {
    const box = canvas.getBoundingClientRect();
    const track = tracks.find(({ y }) => event.clientY - box.top >= y && event.clientY - box.top < y + ROW);
    const pixel = event.clientX - box.left;
    if (!track || pixel < gutter) return null;
    const slack = (view[1] - view[0]) / (width - gutter); // one pixel
    const index = firstAfter(track.spans, timeAt(pixel) - slack);
    const span = track.spans[index];
    return span && span[2] <= timeAt(pixel) + slack ? { track, span } : null;
  }
  function hover(event) {
    const found = spanAt(event);
    if (!found) { hideTip(); return; }
    const [kind, unit, start, end, nbytes] = found.span;
    const step = found.track.rank.steps.find(([, from, to]) => start >= from && start < to);
    const lines = [duration(end - start)];
    if (step) {
      lines[0] += `, ${three((100 * (end - start)) / (step[2] - step[1]))} % of the step`;
      lines.push(`from ${duration(start - step[1])} to ${duration(end - step[1])} of step ${step[0]}`);
    }
    if (nbytes !== undefined) lines.push(`${size(nbytes)} in flight`);
    showTip(event, unit >= 0 ? `${kind} · ${trace.names[unit]}` : kind, [...lines, `rank ${found.track.rank.rank}`]);
  }

  // One pointer selects what to zoom to (a mouse), or moves (a finger, or Shift); two fingers pinch.
  const fingers = new Map();
  const placeOf = (event) => event.clientX - canvas.getBoundingClientRect().left;
  const grab = (moves) => {
    const [at, other] = [...fingers.values()];
    dragged = { from: at, to: at, moves, apart: other && Math.abs(at - other), view };
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, placeOf(event));
    grab(event.shiftKey || event.pointerType === "touch");
    hideTip();
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!fingers.has(event.pointerId)) { hover(event); return; }
    fingers.set(event.pointerId, placeOf(event));
    const [at, other] = [...fingers.values()], { from, apart, view: [begin, end] } = dragged;
    dragged.to = Math.max(gutter, at);
    const nsAPixel = (end - begin) / (width - gutter);
    if (other) {
      const factor = Math.max(apart, 8) / Math.max(Math.abs(at - other), 8);
      const middle = begin + ((at + other) / 2 - gutter) * nsAPixel;
      show(middle - (middle - begin) * factor, middle + (end - middle) * factor);
    } else if (dragged.moves) show(begin + (from - at) * nsAPixel, end + (from - at) * nsAPixel);
    else draw();
  });
  const release = (event) => {
    if (!fingers.delete(event.pointerId)) return;
    const { from, to, moves } = dragged;
    if (fingers.size) { grab(true); return; }
    dragged = null;
    if (!moves && Math.abs(to - from) > 5) show(timeAt(Math.min(from, to)), timeAt(Math.max(from, to)));
    else { draw(); if (moves && Math.abs(to - from) <= 5) hover(event); }
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hideTip(); });
  canvas.addEventListener("dblclick", goHome);
  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!event.ctrlKey && !event.metaKey && !sideways) return; // the page scrolls
    event.preventDefault();
    if (sideways) move(event.deltaX / (width - gutter));
    else zoom(1.0015 ** event.deltaY, timeAt(event.clientX - canvas.getBoundingClientRect().left));
  }, { passive: false });
  const keys = {
    ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(0.6), "=": () => zoom(0.6),
    "-": () => zoom(1 / 0.6), 0: goHome, Escape: goHome,
  };
  canvas.addEventListener("keydown", (event) => {
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });

  const numbers = trace.steps;
  const start = Math.floor((numbers.length - 1) / 2);
  home = view = boundsOf(numbers[start]);
  const labels = [...numbers.map((number) => `step ${number}`), "all"];
  choices("steps", numbers.length > 1 ? labels : [], start, (index) => {
    home = index < numbers.length ? boundsOf(numbers[index]) : whole;
    show(...home);
  });
  const pages = Math.ceil(all.length / RANKS_A_PAGE);
  choices("pages", Array.from({ length: pages }, (_, number) => {
    const shown = all.slice(number * RANKS_A_PAGE, (number + 1) * RANKS_A_PAGE);
    return `ranks ${shown[0].rank}–${shown[shown.length - 1].rank}`;
  }), 0, (index) => { page = index; draw(); });
  const zooming = document.querySelector('[data-role="zoom"]');
  for (const [label, title, act] of [["←", "Earlier", () => move(-0.3)], ["→", "Later", () => move(0.3)], ["+", "Closer", () => zoom(0.5)],
    ["−", "Farther", () => zoom(2)], ["reset", "The whole step", goHome]]) {
    zooming.append(made("button", { title, onclick: act }, label));
  }
  const present = new Set(all.flatMap((rank) => rank.timeline.map(([kind]) => trace.kinds[kind])));
  const legend = document.querySelector('[data-role="legend"]');
  for (const kind of trace.kinds.filter((each) => present.has(each))) {
    legend.append(made("li", {}, made("i", { className: "swatch", style: `background: var(${kindVariable(kind)})` }), kind));
  }
  keepDrawn(canvas.parentElement, draw);
  if (left.zoom?.timeline) show(...left.zoom.timeline);
}
if (trace) drawTimeline();
