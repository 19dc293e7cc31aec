// The timeline: engines, pushes, learner and rewards over the time of the run, in a strip that zooms and scrolls.

const PHASES = ["connect", "prepare", "gate", "transfer", "swap", "confirm", "verify", "publish", "resume"];
const LANES = [["Engines: groups being sampled", 66], ["Pushes by phase", 30], ["Learner", 30], ["Rewards: groups being scored", 34]];
const LABEL = 17, AXIS = 22, WIDEST = 24000;

function timelineCard(run) {
  const lanes = run.timeline, most = [[0, lanes.sampling], [3, lanes.scoring]].map(([lane, values]) => [lane, short(-least(values.map((value) => -value)))]), zoomed = { factor: 1 };
  const scroll = h("div", { class: "scroll", tabindex: 0, role: "img", "aria-label": `Timeline of ${run.label}` });
  const strip = h("div", { class: "lanes" }, scroll);
  let top = 0;
  for (const [name, height] of LANES) {
    const peak = most.find(([lane]) => LANES[lane][0] === name);
    strip.append(h("span", { class: "lane", style: `top:${top}px` }, peak ? `${name}, ${peak[1]} at most` : name));
    top += LABEL + height + 6;
  }
  const draw = () => {
    const seen = scroll.clientWidth, width = Math.min(WIDEST, Math.round(seen * zoomed.factor));
    const middle = (scroll.scrollLeft + seen / 2) / (scroll.scrollWidth || 1);
    scroll.replaceChildren(picture(lanes, width));
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
  scroll.onpointermove = scroll.onpointerdown = (event) => showTip(happening(lanes, event, scroll), event.clientX, event.clientY);
  scroll.onpointerleave = hideAfterMouse;
  const title = DATA.runs.length > 1 ? h("h3", {}, run.label) : h("span", { class: "quiet" }, `${clock(Math.round(lanes.start))} to ${clock(Math.round(lanes.end))} after the start of the run`);
  return h("div", { class: "card timeline" }, h("div", { class: "row" }, title, buttons), strip, timelineLegend(lanes));
}

function picture(lanes, width) {
  const toX = scale([lanes.start, lanes.end], [0, width]), ground = [], parts = [], tops = [];
  let top = 0;
  for (const [, height] of LANES) {
    ground.push(svg("rect", { x: 0, y: top + LABEL, width, height, fill: "var(--ground)" }));
    tops.push([top + LABEL, height]);
    top += LABEL + height + 6;
  }
  parts.push(level(lanes.sampling, tops[0], width, colour(0)), level(lanes.scoring, tops[3], width, colour(3)));
  parts.push(blocks(lanes.paused, tops[0], toX, "var(--paused)", 0.55));
  parts.push(blocks(lanes.pushes, tops[1], toX, "var(--idle)"));
  for (const phase of PHASES) parts.push(blocks(lanes.phases.filter(([, , name]) => name === phase), tops[1], toX, phaseColour(phase)));
  for (const kind of LEARNER) parts.push(blocks(lanes.learner.filter(([, , name]) => learnerKind(name) === kind), tops[2], toX, learnerColour(kind)));
  const step = clockStep(((lanes.end - lanes.start) * 90) / width);
  const marks = [];
  for (let at = Math.ceil(lanes.start / step) * step; at <= lanes.end - step / 3; at += step)
    marks.push(svg("line", { x1: toX(at), x2: toX(at), y1: 0, y2: top + 14, stroke: "var(--line)" }), svg("text", { x: toX(at) + 3, y: top + 13 }, clock(Number(at.toFixed(1)))));
  return svg("svg", { width, height: top + AXIS }, ground, marks, parts);
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

/** How many at a time, as an area under steps. */
function level(values, [top, height], width, fill) {
  const most = -least(values.map((value) => -value)) || 1, wide = width / values.length;
  let path = `M0 ${top + height}`;
  values.forEach((value, index) => (path += `V${(top + height * (1 - value / most)).toFixed(1)}H${((index + 1) * wide).toFixed(1)}`));
  return svg("path", { class: "series", d: `${path}V${top + height}Z`, fill, opacity: 0.6 });
}

function blocks(segments, [top, height], toX, fill, opacity = 1) {
  let path = "";
  for (const [start, end] of segments) path += `M${toX(start).toFixed(2)} ${top}h${Math.max(0.7, toX(end) - toX(start)).toFixed(2)}v${height}H${toX(start).toFixed(2)}Z`;
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
  return h("ul", { class: "legend" }, item(colour(0), "generating"), lanes.paused.length ? item("var(--paused)", "paused for a push") : null,
    present.map((phase) => item(phaseColour(phase), `push: ${phase}`)),
    kinds.map((kind) => item(learnerColour(kind), { wait: "learner waits for rollouts", step: "learner trains", checkpoint: "checkpoint", other: "learner: other" }[kind])),
    item(colour(3), "scoring"));
}

/** What went on at the moment and in the lane under the pointer. */
function happening(lanes, event, scroll) {
  const box = scroll.firstChild.getBoundingClientRect(), at = lanes.start + ((event.clientX - box.left) / box.width) * (lanes.end - lanes.start);
  let y = event.clientY - box.top, lane = 0;
  while (lane < LANES.length - 1 && y > LABEL + LANES[lane][1] + 6) y -= LABEL + LANES[lane++][1] + 6;
  const within = (segments) => segments.filter(([start, end]) => start <= at && at <= end).map(([start, end, name]) => `${name}: ${duration(end - start)}`);
  const count = (values, what) => `${short(values[Math.min(values.length - 1, Math.floor(((at - lanes.start) / (lanes.end - lanes.start)) * values.length))])} groups ${what}`;
  const lines = [
    [count(lanes.sampling, "being sampled"), ...within(lanes.paused)],
    [...within(lanes.pushes), ...within(lanes.phases)],
    within(lanes.learner),
    [count(lanes.scoring, "being scored")],
  ][lane];
  return [`${clock(Number(at.toFixed(2)))} after the start`, ...(lines.length ? lines : ["nothing"])].join("\n");
}
