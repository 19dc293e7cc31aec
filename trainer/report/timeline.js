// The timeline: engines, pushes, learner and rewards over the time of the run, in a strip that zooms and scrolls.

const PHASES = ["connect", "prepare", "gate", "transfer", "swap", "confirm", "verify", "publish", "resume"];
const LABEL = 17, AXIS = 22, GAP = 6, WIDEST = 24000;

/** The lanes of a run from top to bottom: `draw(top, toX, width)` makes the picture of one, `tell(at, y)` says what is
 * at a moment, `y` pixels below the lane's beginning. */
function lanesOf(lanes) {
  const most = (values) => -least(values.map((value) => -value)), within = (segments, at) =>
    segments.filter(([start, end]) => start <= at && at <= end).map(([start, end, name]) => `${name}: ${duration(end - start)}`);
  const valueAt = (values, at) => values[Math.min(values.length - 1, Math.floor(((at - lanes.start) / (lanes.end - lanes.start)) * values.length))];
  const groups = (label, values, height, fill, what, pauses) => ({
    label: `${label}, ${short(most(values))} at most`, height,
    draw: (top, toX, width) => [level(values, [top, height], width, fill, most(values)), pauses ? blocks(lanes.paused, [top, height], toX, "var(--paused)", 0.55) : null],
    tell: (at) => [`${short(valueAt(values, at))} groups ${what}`, ...(pauses ? within(lanes.paused, at) : [])],
  });
  const segments = (label, draw, tell) => ({ label, height: 30, draw, tell });
  return [
    groups("Groups being sampled", lanes.sampling, 66, colour(0), "being sampled", true),
    lanes.engines.length ? enginesLane(lanes, most(lanes.engines.flatMap(([, values]) => values)), valueAt) : null,
    segments("Pushes by phase", (top, toX) => [blocks(lanes.pushes, [top, 30], toX, "var(--idle)"),
      ...PHASES.map((phase) => blocks(lanes.phases.filter(([, , name]) => name === phase), [top, 30], toX, phaseColour(phase)))],
      (at) => [...within(lanes.pushes, at), ...within(lanes.phases, at)]),
    segments("Learner", (top, toX) => LEARNER.map((kind) => blocks(lanes.learner.filter(([, , name]) => learnerKind(name) === kind), [top, 30], toX, learnerColour(kind))),
      (at) => within(lanes.learner, at)),
    lanes.evaluations.length ? segments("Evaluations", (top, toX) => [blocks(lanes.evaluations, [top, 30], toX, colour(7), 1, 2)], (at) => within(lanes.evaluations, at)) : null,
    groups("Groups being scored", lanes.scoring, 34, colour(3), "being scored", false),
  ].filter(Boolean);
}

/** One lane of all engines, a row each, on one scale: who has little to do is seen beside who has much. */
function enginesLane(lanes, most, valueAt) {
  const rows = lanes.engines, height = Math.max(6, Math.min(26, Math.floor(300 / rows.length))), gap = height > 8 ? 3 : 1;
  const more = lanes.more_engines ? `, and ${lanes.more_engines} more that are not shown` : "";
  return {
    label: `Rollouts of each engine, ${short(most)} at most${more}`,
    height: rows.length * (height + gap) - gap,
    draw: (top, toX, width) => [
      ...rows.map(([, values], row) => level(values, [top + row * (height + gap), height], width, colour(5), most)),
      ...rows.map((_, row) => blocks(lanes.paused, [top + row * (height + gap), height], toX, "var(--paused)", 0.4)),
      ...rows.slice(1).map((_, row) => svg("rect", { x: 0, y: top + (row + 1) * (height + gap) - gap, width, height: gap, fill: "var(--card)" })),
    ],
    tell: (at, y) => {
      const [name, values] = rows[Math.max(0, Math.min(rows.length - 1, Math.floor(y / (height + gap))))];
      return [`${name}: ${short(valueAt(values, at))} rollouts`];
    },
  };
}

function timelineCard(run) {
  const lanes = run.timeline, rows = lanesOf(lanes), zoomed = { factor: 1 };
  const scroll = h("div", { class: "scroll", tabindex: 0, role: "img", "aria-label": `Timeline of ${run.label}` });
  const strip = h("div", { class: "lanes" }, scroll);
  let top = 0;
  for (const row of rows) {
    strip.append(h("span", { class: "lane", style: `top:${top}px` }, row.label));
    row.top = top + LABEL;
    top += LABEL + row.height + GAP;
  }
  const draw = () => {
    const seen = scroll.clientWidth, width = Math.min(WIDEST, Math.round(seen * zoomed.factor));
    const middle = (scroll.scrollLeft + seen / 2) / (scroll.scrollWidth || 1);
    scroll.replaceChildren(picture(lanes, rows, top, width));
    scroll.scrollLeft = middle * width - seen / 2;
  };
  redrawn(scroll, draw);
  const zoom = (factor) => h("button", { type: "button", "aria-label": factor ? (factor > 1 ? "Zoom in" : "Zoom out") : "Whole run" }, factor ? (factor > 1 ? "+" : "−") : "Whole run");
  const buttons = [2, 0.5, 0].map((factor) => {
    const button = zoom(factor);
    button.onclick = () => {
      const widest = WIDEST / Math.max(scroll.clientWidth, 1);
      zoomed.factor = factor ? Math.min(widest, Math.max(1, zoomed.factor * factor)) : 1;
      draw();
    };
    return button;
  });
  scroll.onpointermove = scroll.onpointerdown = (event) => showTip(happening(lanes, rows, event, scroll), event.clientX, event.clientY);
  scroll.onpointerleave = hideAfterMouse;
  const title = DATA.runs.length > 1 ? h("h3", {}, run.label) : h("span", { class: "quiet" }, `${clock(Math.round(lanes.start))} to ${clock(Math.round(lanes.end))} after the start of the run`);
  return h("div", { class: "card timeline" }, h("div", { class: "row" }, title, buttons), strip, timelineLegend(lanes));
}

function picture(lanes, rows, bottom, width) {
  const toX = scale([lanes.start, lanes.end], [0, width]), marks = [];
  const ground = rows.map((row) => svg("rect", { x: 0, y: row.top, width, height: row.height, fill: "var(--ground)" }));
  const step = clockStep(((lanes.end - lanes.start) * 90) / width);
  for (let at = Math.ceil(lanes.start / step) * step; at <= lanes.end - step / 3; at += step)
    marks.push(svg("line", { x1: toX(at), x2: toX(at), y1: 0, y2: bottom + 14, stroke: "var(--line)" }), svg("text", { x: toX(at) + 3, y: bottom + 13 }, clock(Number(at.toFixed(1)))));
  return svg("svg", { width, height: bottom + AXIS }, ground, marks, rows.map((row) => row.draw(row.top, toX, width)).flat());
}

/** The next larger time between two marks of a clock. */
function clockStep(seconds) {
  const marks = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
  return marks.find((mark) => mark >= seconds) || Math.ceil(seconds / 86400) * 86400;
}

function clock(seconds) {
  const minutes = Math.floor(seconds / 60), two = (number) => String(number).padStart(2, "0");
  return minutes < 60 ? `${minutes}:${two(trimmed(seconds % 60, 4))}` : `${Math.floor(minutes / 60)}:${two(minutes % 60)}:${two(Math.round(seconds % 60))}`;
}

/** How many at a time, as an area under steps; `most` reaches to the top. */
function level(values, [top, height], width, fill, most) {
  const wide = width / values.length;
  let path = `M0 ${top + height}`;
  values.forEach((value, index) => (path += `V${(top + height * (1 - value / (most || 1))).toFixed(1)}H${((index + 1) * wide).toFixed(1)}`));
  return svg("path", { class: "series", d: `${path}V${top + height}Z`, fill, opacity: 0.6 });
}

function blocks(segments, [top, height], toX, fill, opacity = 1, narrowest = 0.7) {
  let path = "";
  for (const [start, end] of segments) path += `M${toX(start).toFixed(2)} ${top}h${Math.max(narrowest, toX(end) - toX(start)).toFixed(2)}v${height}H${toX(start).toFixed(2)}Z`;
  return svg("path", { class: "series", d: path, fill, opacity });
}

const LEARNER = ["wait", "step", "checkpoint", "other"];

function learnerKind(name) {
  return LEARNER.find((kind) => name.startsWith(kind)) || "other";
}

function learnerColour(kind) {
  return { wait: "var(--idle)", step: colour(2), checkpoint: colour(6), other: colour(8) }[kind];
}

/** The colours of phases: those that take long are far from each other. */
function phaseColour(phase) {
  return colour([8, 4, 1, 0, 3, 5, 6, 7, 2][PHASES.indexOf(phase)]);
}

function timelineLegend(lanes) {
  const present = PHASES.filter((phase) => lanes.phases.some(([, , name]) => name === phase));
  const kinds = LEARNER.filter((kind) => lanes.learner.some(([, , name]) => learnerKind(name) === kind));
  const item = (fill, text) => h("li", {}, h("span", { class: "swatch", style: `background:${fill}` }), text);
  return h("ul", { class: "legend" }, item(colour(0), "generating"), lanes.engines.length ? item(colour(5), "an engine's rollouts") : null, lanes.paused.length ? item("var(--paused)", "paused for a push") : null,
    present.map((phase) => item(phaseColour(phase), `push: ${phase}`)),
    kinds.map((kind) => item(learnerColour(kind), { wait: "learner waits for rollouts", step: "learner trains", checkpoint: "checkpoint", other: "learner: other" }[kind])),
    lanes.evaluations.length ? item(colour(7), "evaluation") : null, item(colour(3), "scoring"));
}

/** What went on at the moment and in the lane under the pointer. */
function happening(lanes, rows, event, scroll) {
  const box = scroll.firstChild.getBoundingClientRect(), at = lanes.start + ((event.clientX - box.left) / box.width) * (lanes.end - lanes.start);
  const y = event.clientY - box.top, lane = rows.find((row) => y < row.top + row.height + GAP) || rows[rows.length - 1];
  const lines = lane.tell(at, y - lane.top);
  return [`${clock(Number(at.toFixed(2)))} after the start`, ...(lines.length ? lines : ["nothing"])].join("\n");
}
