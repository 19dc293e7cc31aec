// The page from top to bottom.

const head = document.getElementById("head"), contents = document.getElementById("contents"), sections = document.getElementById("sections");

function section(title, ...children) {
  const id = `s-${sections.children.length}`;
  sections.append(h("section", { id }, h("h2", {}, title), ...children));
  contents.append(h("a", { href: `#${id}` }, title.split(":")[0]));
}

function badge(run) {
  return h("span", { class: `badge ${["done", "failed", "interrupted"].includes(run.status) ? run.status : "unfinished"}` }, run.status || "no summary: running, or killed");
}

function swatch(place) {
  return DATA.runs.length > 1 ? h("span", { class: "swatch", style: `background:${colour(place)}` }) : null;
}

function header() {
  const several = DATA.runs.length > 1, first = DATA.runs[0];
  document.title = several ? `${DATA.runs.length} runs · Midflight` : `${first.settings.name || first.label} · Midflight`;
  if (several) head.append(h("h1", {}, `${DATA.runs.length} runs side by side`));
  DATA.runs.forEach((run, place) => {
    const name = run.settings.name || run.label;
    head.append(several ? h("div", { class: "row" }, swatch(place), h("b", {}, run.label), h("span", {}, name), badge(run)) : h("h1", {}, name, " ", badge(run)));
    const known = run.settings, model = known["model.path"] === "auto" || !known["model.path"] ? (known.model_folder || "auto").split("/").pop() : known["model.path"];
    head.append(h("div", { class: "quiet" }, [`model ${model}`, known.hardware && `hardware ${known.hardware}`, known.seed && `seed ${known.seed}`, run.started && `started ${run.started}`, run.path].filter(Boolean).join(" · ")));
    if (run.error) head.append(h("div", { class: "note error" }, run.error));
    if (run.notes.length) head.append(h("div", { class: "note" }, several ? h("b", {}, run.label) : null, h("ul", {}, run.notes.map((note) => h("li", {}, note)))));
  });
  if (!several) head.append(facts(first));
}

/** The numbers that a run is judged by first. */
function facts(run) {
  const value = (name) => run.summary[name]?.[0], list = h("dl", { class: "facts" });
  const add = (term, text, more) => text !== null && list.append(h("div", {}, h("dt", {}, term), h("dd", {}, text, more ? h("small", {}, ` ${more}`) : null)));
  const has = (name) => value(name) !== undefined;
  add("steps", has("steps") ? whole(value("steps")) : String(run.steps), run.settings.steps && `of ${run.settings.steps}`);
  if (has("wall_seconds")) add("wall time", duration(value("wall_seconds")));
  if (has("reward/last10_mean")) add("reward, last 10 steps", short(value("reward/last10_mean")), `first 10: ${short(value("reward/first10_mean"))}`);
  if (has("eval/last_reward_mean")) add("evaluation, last", short(value("eval/last_reward_mean")), `best: ${short(value("eval/best_reward_mean"))} (version ${value("eval/best_version")})`);
  if (has("tokens/trained")) add("tokens trained on", short(value("tokens/trained")), `of ${short(value("tokens/generated"))}`);
  if (has("tokens/expired")) add("tokens too old, lost", short(value("tokens/expired")), `+ ${short(value("tokens/lost"))}`);
  if (has("rollouts/resumed")) add("resumed across pushes", short(value("rollouts/resumed")), `of ${short(value("rollouts/finished"))} rollouts`);
  if (has("push/count")) add("pushes", whole(value("push/count")), has("push/pause_seconds_mean") ? `pause ${duration(value("push/pause_seconds_mean"))}` : "");
  if (has("idle/learner_share")) add("learner waited", `${short(100 * value("idle/learner_share"))}%`, "of its time");
  return list;
}

function table(columns, rows) {
  return h("div", { class: "card scroll", tabindex: 0 }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, ""), columns)), h("tbody", {}, rows)));
}

function runHeads() {
  return DATA.runs.map((run, place) => h("th", { scope: "col" }, swatch(place), " ", run.label));
}

function comparison() {
  const names = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.summary)))].filter((name) => DATA.runs.some((run) => run.summary[name]?.[0]));
  const text = (entry) => (entry ? (entry[1] === "seconds" ? duration(entry[0]) : whole(entry[0])) : "–");
  const settings = DATA.settings.length
    ? table(runHeads(), DATA.settings.map(([name, values]) => h("tr", {}, h("th", { scope: "row" }, name), values.map((value) => h("td", {}, value ?? "–")))))
    : h("p", { class: "quiet" }, "The runs have the same settings.");
  const totals = table(runHeads(), names.map((name) => h("tr", {}, h("th", { scope: "row", title: DATA.summary_help[name] }, name),
    DATA.runs.map((run) => h("td", { class: "number" }, text(run.summary[name]))))));
  section("Side by side", h("div", { class: "pair" }, h("div", {}, h("h3", {}, "Totals that are not 0"), totals), h("div", {}, h("h3", {}, "Settings that differ"), settings)));
}

function settings() {
  const rows = (values) => Object.entries(values).map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, value)));
  section("Settings", DATA.runs.map((run) => h("details", { class: "card" }, h("summary", {}, `Configuration and package versions${DATA.runs.length > 1 ? ` of ${run.label}` : ""}`),
    h("div", { class: "scroll" }, h("table", {}, h("tbody", {}, rows(run.settings), rows(run.versions)))))));
}

header();
if (DATA.runs.length > 1) comparison();
for (const group of [...new Set(DATA.charts.map((spec) => spec.group))]) {
  const specs = DATA.charts.filter((spec) => spec.group === group), still = specs.filter((spec) => constant(spec) !== null);
  section(group, h("div", { class: "charts" }, specs.filter((spec) => !still.includes(spec)).map(chart)),
    still.length ? h("p", { class: "quiet" }, `The same in every step: ${still.map((spec) => `${spec.title} (${constant(spec)})`).join("; ")}.`) : null);
}
if (DATA.runs.some((run) => run.timeline)) section("Timeline", DATA.runs.filter((run) => run.timeline).map(timelineCard));
if (DATA.runs.some((run) => run.rollouts.length)) section("Rollouts", ...rolloutsSection());
settings();
sections.append(h("footer", {}, `Written by Midflight, ${DATA.written}. This file is complete in itself and asks nothing of a network.`));
