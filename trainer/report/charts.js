// Charts of metrics over steps. One run: a colour a metric. Several: a colour a run, and a dash a metric.

const HEIGHT = 170, LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 20;
const DASHES = ["", "5 3", "2 2", "8 3 2 3", "1 3"];
const NAMES = {
  "idle/learner_seconds": "waiting for rollouts", "timing/train_seconds": "training", "push/seconds": "push",
  "timing/rest_seconds": "rest", "reward/mean": "mean", "eval/reward_mean": "evaluation", "completions/length_mean": "mean",
  "eval/length_mean": "evaluation", "timing/before_updates_seconds": "before updates", "eval/truncated_fraction": "truncated",
};

function label(name) {
  const lag = name.match(/^by_lag\/([^/]+)\//);
  if (lag) return `age ${lag[1].replaceAll("_", " ")}`;
  return NAMES[name] || name.slice(name.indexOf("/") + 1).replace(/_(seconds|tokens_per_second|fraction)$/, "").replaceAll("_", " ");
}

/** Of a chart whose metrics never change within a run, what they are: "stop 1"; else null. */
function constant(spec) {
  const names = spec.kind === "stack" ? [] : [...spec.metrics, ...(spec.band || []), ...spec.points];
  if (DATA.runs.every((run) => run.steps < 2)) return null;
  const texts = [];
  for (const run of DATA.runs) {
    for (const name of names) {
      if (run.extremes[name]) return null;
      const seen = new Set((run.columns[name] || run.evaluations[name] || []).filter((value) => value !== null));
      if (seen.size > 1) return null;
      for (const value of seen) texts.push(`${DATA.runs.length > 1 ? `${run.label}: ` : ""}${label(name)} ${short(value)}`);
    }
  }
  return texts.length ? texts.join(", ") : null;
}

/** The figure of a chart; a stack, and one by age, has a panel a run. */
function chart(spec) {
  const runs = DATA.runs.filter((run) => [...spec.metrics, ...spec.points].some((name) => run.columns[name] || run.evaluations[name]));
  const aged = spec.metrics.some((name) => name.startsWith("by_lag/"));
  const panels = spec.kind === "stack" || aged ? runs.map((run) => [run]) : [runs];
  const figure = h("figure", panels.length > 1 ? { class: "wide" } : {}, h("figcaption", {}, h("h3", {}, spec.title), h("span", { class: "quiet" }, spec.unit)));
  const all = panels.map((shown) => seriesOf(spec, shown, aged));
  const range = rangeOf(all.flat(), spec, runs);
  figure.append(h("div", panels.length > 1 ? { class: "panels" } : {}, panels.map((shown, place) =>
    h("div", {}, panels.length > 1 ? h("div", { class: "panel" }, shown[0].label) : null, ...panel(spec, all[place], range)))));
  const joined = runs.map((run) => Math.ceil(run.steps / ((run.columns.step || []).length || 1))).filter((steps) => steps > 1);
  figure.append(h("details", { class: "help" }, h("summary", {}, "What is shown"),
    h("dl", {}, spec.help.map(([name, meaning]) => [h("dt", {}, name), h("dd", {}, meaning)])),
    joined.length ? h("p", {}, `A point is the mean of ${[...new Set(joined)].join(" or ")} steps${all.flat().some((one) => one.extremes) ? "; the area around a line goes from their smallest value to their largest" : ""}.`) : null));
  return figure;
}

function seriesOf(spec, runs, aged) {
  const found = [], several = DATA.runs.length > 1 && !aged && spec.kind !== "stack";
  const names = [...spec.metrics, ...spec.points];
  for (const run of runs) {
    for (const name of names) {
      const points = spec.points.includes(name), columns = points ? run.evaluations : run.columns;
      if (!columns[name]) continue;
      const place = names.indexOf(name), lags = names.length, phase = PHASES.find((known) => name === `push/${known}_seconds`);
      const edges = name === spec.metrics[0] && spec.band ? spec.band.map((edge) => columns[edge]) : [];
      const extremes = points || spec.kind === "stack" ? null : run.extremes[name];
      found.push({
        name, points, xs: columns.step, ys: columns[name], band: edges[0] && edges[1] ? edges : extremes || null, extremes,
        colour: several ? colour(DATA.runs.indexOf(run)) : aged ? ageOnGround(place, lags - 1) : phase ? phaseColour(phase) : colour(place),
        dash: several ? DASHES[place % DASHES.length] : "",
        label: several ? (names.length > 1 ? `${run.label}: ${label(name)}` : run.label) : label(name),
      });
    }
  }
  return found;
}

function rangeOf(series, spec, runs) {
  const xs = series.flatMap((one) => one.xs), stack = spec.kind === "stack";
  let values;
  if (stack) values = runs.flatMap((run) => totals(spec.metrics.map((name) => run.columns[name]).filter(Boolean)));
  else values = series.flatMap((one) => [...one.ys, ...(one.band || []).flat()]);
  values = values.filter((value) => value !== null);
  let low = least(values), high = -least(values.map((value) => -value));
  if (!Number.isFinite(low)) [low, high] = [0, 1];
  if (stack || (low > 0 && low < 0.5 * high)) low = 0;
  if (low === high) [low, high] = low === 0 ? [0, 1] : [Math.min(0, low), Math.max(0, high)];
  const step = tickStep(high - low, 4);
  return { x: [least(xs), -least(xs.map((x) => -x))], y: [Math.floor(low / step + 0.01) * step, Math.ceil(high / step - 0.01) * step], step };
}

function least(values) {
  return values.reduce((smallest, value) => Math.min(smallest, value), Infinity);
}

function totals(columns) {
  return columns.length ? columns[0].map((_, index) => columns.reduce((sum, column) => sum + (column[index] || 0), 0)) : [];
}

function tickStep(span, count) {
  const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999);
}

/** Legend and plot of a panel. The legend shows the last values, or those at the step under the pointer. */
function panel(spec, series, range) {
  const values = series.map(() => h("b"));
  const legend = h("ul", { class: "legend" }, series.map((one, place) => h("li", {}, key(one, spec.kind), h("span", {}, one.label), values[place])));
  const at = h("li", { class: "quiet" });
  legend.append(at);
  const plot = h("div", { class: "plot", role: "img", "aria-label": `${spec.title}, ${spec.unit}` });
  const show = (step) => {
    series.forEach((one, place) => (values[place].textContent = short(one.ys[spec.kind === "stack" && step === null ? one.ys.length - 1 : nearest(one, step)])));
    at.textContent = step === null ? "" : `at step ${step}`;
  };
  show(null);
  redrawn(plot, (width) => {
    const toX = scale(range.x, [LEFT + 4, width - RIGHT - 4]), toY = scale(range.y, [HEIGHT - BOTTOM, TOP]);
    const cursor = svg("line", { y1: TOP, y2: HEIGHT - BOTTOM, stroke: "var(--quiet)", "stroke-dasharray": "2 2", visibility: "hidden" });
    const drawn = spec.kind === "stack" ? bars(series, toX, toY) : series.flatMap((one) => line(one, toX, toY));
    plot.replaceChildren(svg("svg", { width, height: HEIGHT, "aria-hidden": "true" }, axes(range, toX, toY, width), drawn, cursor));
    const point = (event) => {
      const x = event.clientX - plot.getBoundingClientRect().left;
      const longest = series.reduce((most, one) => (one.xs.length > most.xs.length ? one : most), series[0]);
      const step = longest.xs[nearest(longest, toX.back(x))];
      cursor.setAttribute("x1", toX(step));
      cursor.setAttribute("x2", toX(step));
      cursor.setAttribute("visibility", "visible");
      show(step);
    };
    plot.onpointermove = plot.onpointerdown = point;
    plot.onpointerleave = (event) => event.pointerType === "mouse" && (cursor.setAttribute("visibility", "hidden"), show(null));
  });
  return [legend, plot];
}

/** The index of the x nearest to `step`; of the last value where `step` is null. */
function nearest(one, step) {
  if (step === null) return one.ys.length - 1 - Math.max(0, [...one.ys].reverse().findIndex((y) => y !== null));
  let best = 0;
  one.xs.forEach((x, index) => (best = Math.abs(x - step) < Math.abs(one.xs[best] - step) ? index : best));
  return best;
}

function scale([from, to], [start, end]) {
  const slope = to === from ? 0 : (end - start) / (to - from);
  const place = (value) => (slope ? start + (value - from) * slope : (start + end) / 2);
  place.back = (pixel) => (slope ? from + (pixel - start) / slope : from);
  return place;
}

function axes(range, toX, toY, width) {
  const parts = [];
  for (let index = 0; index <= Math.round((range.y[1] - range.y[0]) / range.step); index++) {
    const value = range.y[0] + index * range.step, y = Math.round(toY(value)) + 0.5;
    parts.push(svg("line", { x1: LEFT, x2: width - RIGHT, y1: y, y2: y, stroke: "var(--grid)" }));
    parts.push(svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, tick(value, range.step)));
  }
  const step = Math.max(1, tickStep(range.x[1] - range.x[0] || 1, width > 500 ? 8 : 4));
  for (let x = Math.ceil(range.x[0] / step) * step; x <= range.x[1]; x += step)
    parts.push(svg("text", { x: Math.min(toX(x), width - 1 - 3.6 * short(x).length), y: HEIGHT - 5, "text-anchor": "middle" }, short(x)));
  return parts;
}

/** The number beside a line of the grid, with as many digits as tell it from the next one. */
function tick(value, step) {
  if (Math.abs(value) < step / 1e6) return "0";
  const digits = -Math.floor(Math.log10(step) + 1e-9) + (String(Number(step.toPrecision(2))).replace(/[0.]|e.*/g, "").length > 1 ? 1 : 0);
  return step < 0.0005 || Math.abs(value) >= 1e4 ? short(value) : String(Number(value.toFixed(Math.max(0, digits))));
}

/** A line with gaps where there is no value; a value between gaps, and those of evaluations, as points. */
function line(one, toX, toY) {
  const drawn = [], dots = [];
  let path = "", pen = false;
  one.ys.forEach((y, index) => {
    const none = (other) => one.ys[other] === null || one.ys[other] === undefined;
    if (y === null) { if (!one.points) pen = false; return; }
    path += `${pen ? "L" : "M"}${toX(one.xs[index]).toFixed(1)} ${toY(y).toFixed(1)}`;
    pen = true;
    if (one.points || (none(index - 1) && none(index + 1))) dots.push([toX(one.xs[index]), toY(y)]);
  });
  if (one.band) drawn.push(svg("path", { d: area(one, toX, toY), fill: one.colour, opacity: 0.14 }));
  drawn.push(svg("path", { class: "series", d: path, fill: "none", stroke: one.colour, "stroke-width": one.points ? 1 : 1.8, "stroke-dasharray": one.dash, "stroke-linejoin": "round" }));
  dots.forEach(([x, y]) => drawn.push(svg("circle", { cx: x, cy: y, r: 3.2, fill: "var(--card)", stroke: one.colour, "stroke-width": 1.8 })));
  return drawn;
}

function area(one, toX, toY) {
  const kept = one.xs.map((x, index) => [x, one.band[0][index], one.band[1][index]]).filter(([, low, high]) => low !== null && high !== null);
  const edge = (points) => points.map(([x, y]) => `${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`).join("L");
  return kept.length ? `M${edge(kept.map(([x, low]) => [x, low]))}L${edge(kept.map(([x, , high]) => [x, high]).reverse())}Z` : "";
}

function bars(series, toX, toY) {
  const size = series[0].xs.length, heights = new Array(size).fill(0);
  const wide = Math.max(0.6, Math.min(24, (toX(series[0].xs[size - 1]) - toX(series[0].xs[0])) / Math.max(size - 1, 1)));
  return series.map((one) => {
    let path = "";
    one.ys.forEach((y, index) => {
      if (!y) return;
      const x = toX(one.xs[index]) - wide / 2, low = toY(heights[index]), high = toY((heights[index] += y));
      path += `M${x.toFixed(1)} ${low.toFixed(1)}V${high.toFixed(1)}h${(wide > 4 ? wide - 1 : wide).toFixed(2)}V${low.toFixed(1)}Z`;
    });
    return svg("path", { class: "series", d: path, fill: one.colour });
  });
}

/** The mark of a series in the legend. */
function key(one, kind) {
  if (kind === "stack") return svg("svg", { width: 12, height: 12 }, svg("rect", { width: 12, height: 12, rx: 2, fill: one.colour }));
  const dot = one.points ? svg("circle", { cx: 10, cy: 6, r: 3.2, fill: "var(--card)", stroke: one.colour, "stroke-width": 1.8 }) : null;
  return svg("svg", { width: 20, height: 12 }, svg("line", { x1: 0, x2: 20, y1: 6, y2: 6, stroke: one.colour, "stroke-width": one.points ? 1 : 2, "stroke-dasharray": one.dash }), dot);
}
