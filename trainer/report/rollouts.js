// Rollouts as text: every token on the colour of the policy version that sampled it.

function rolloutsSection() {
  const runs = DATA.runs.filter((run) => run.rollouts.length), body = h("div");
  const state = { run: runs[0], step: null, by: "version" };
  const choose = h("div", { class: "row", role: "group", "aria-label": "Step" });
  const draw = () => {
    const steps = [...new Set(state.run.rollouts.map((rollout) => rollout.step))];
    if (!steps.includes(state.step)) state.step = telling(state.run.rollouts, steps);
    choose.replaceChildren(h("span", { class: "quiet" }, "step"), ...steps.map((step) => {
      const button = h("button", { type: "button", "aria-pressed": String(step === state.step) }, String(step));
      button.onclick = () => ((state.step = step), draw());
      return button;
    }));
    const most = -least(state.run.rollouts.flatMap((rollout) => rollout.versions.map(([version]) => version - rollout.step + 1)));
    const shown = state.run.rollouts.filter((rollout) => rollout.step === state.step);
    body.replaceChildren(scaleLegend(state.by, most), h("div", { class: "cards" }, shown.map((rollout) => rolloutCard(rollout, most, state.by))));
  };
  const picker = h("select", { "aria-label": "Run" }, runs.map((run, place) => h("option", { value: place }, run.label)));
  picker.onchange = () => ((state.run = runs[picker.value]), draw());
  const by = h("select", { "aria-label": "Colour by" }, h("option", { value: "version" }, "coloured by version"), h("option", { value: "logprob" }, "coloured by log-probability"));
  by.onchange = () => ((state.by = by.value), draw());
  draw();
  return [h("div", { class: "row" }, runs.length > 1 ? picker : null, by), h("div", { style: "height:6px" }), choose, body];
}

/** The step to show first: most versions in a rollout, then most different rewards, then the latest. */
function telling(rollouts, steps) {
  const rank = (step) => {
    const shown = rollouts.filter((rollout) => rollout.step === step);
    return -1000 * least(shown.map((rollout) => -rollout.versions.length)) + new Set(shown.map((rollout) => rollout.reward)).size;
  };
  return steps.reduce((best, step) => (rank(step) >= rank(best) ? step : best));
}

function scaleLegend(by, most) {
  const item = (ground, text) => h("li", {}, h("span", { class: "swatch", style: `background:${ground}` }), text);
  if (by === "logprob") return h("ul", { class: "legend" }, [0, 1, 2, 4, 6].map((nats) => item(ramp(nats / 6).ground, nats ? `−${nats}${nats === 6 ? " nats and less" : ""}` : "0")));
  const ages = Array.from({ length: most + 1 }, (_, age) => age).filter((age) => most < 9 || age % Math.ceil(most / 8) === 0);
  return h("ul", { class: "legend" }, h("li", { class: "quiet" }, "versions behind the learner:"), ages.map((age) => item(ageColour(age, most).ground, String(age))),
    h("li", { class: "quiet" }, "a mark like v12 stands where a version begins"));
}

function rolloutCard(rollout, most, by) {
  const fact = (name, value) => h("span", {}, `${name} `, h("b", {}, value));
  const parts = Object.entries(rollout.parts).map(([name, value]) => `${name} ${short(value)}`).join(", ");
  const head = h("div", { class: "row" }, fact("reward", short(rollout.reward)), fact("advantage", short(rollout.advantage)), fact("tokens", String(rollout.length)),
    fact("finish", rollout.finish), fact("versions", String(new Set(rollout.versions.map(([version]) => version)).size)), rollout.reasons.map((reason) => h("span", { class: "chip" }, reason)));
  return h("article", { class: `card ${rollout.length > 150 ? "wide" : ""}` }, head, parts ? h("div", { class: "quiet" }, `reward: ${parts}`) : null,
    h("details", { class: "prompt" }, h("summary", {}, "Prompt"), h("pre", {}, rollout.prompt)), tokens(rollout, most, by), versionLegend(rollout, most),
    rollout.text === null ? null : h("details", { class: "prompt", open: "" }, h("summary", {}, "Text"), h("pre", {}, rollout.text)));
}

function versionLegend(rollout, most) {
  const counts = new Map();
  rollout.versions.forEach(([version, count]) => counts.set(version, (counts.get(version) || 0) + count));
  return h("ul", { class: "legend" }, [...counts].map(([version, count]) =>
    h("li", {}, h("span", { class: "swatch", style: `background:${ageColour(rollout.step - 1 - version, most).ground}` }), `version ${version} (${rollout.step - 1 - version} behind): ${count} tokens`)));
}

/** Values of runs of equal ones, [[value, count], ...], one a token. */
function unrolled(runs) {
  return runs.flatMap(([value, count]) => new Array(count).fill(value));
}

function tokens(rollout, most, by) {
  const versions = unrolled(rollout.versions), kinds = unrolled(rollout.kinds);
  const text = h("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens; arrow keys go through them" });
  const spans = rollout.pieces.map((piece, place) => {
    const observed = kinds[place] === "observed", span = h("span", { class: kinds[place] }, visible(piece));
    const shade = by === "logprob" ? ramp(-(rollout.logprobs[place] ?? 0) / 6) : ageColour(rollout.step - 1 - versions[place], most);
    if (!observed) Object.assign(span.style, { background: shade.ground, color: shade.text });
    return span;
  });
  const [head, missing] = rollout.left_out;
  spans.forEach((span, place) => {
    if (missing && place === head) text.append(h("b", {}, `\n… ${missing} tokens are left out here …\n`));
    if (kinds[place] !== "observed" && versions[place] !== versions[place - 1]) text.append(h("i", {}, `v${versions[place]}`));
    text.append(span);
  });
  interactive(text, spans, (place) => describe(rollout, place, versions, kinds, missing && place >= head ? missing : 0));
  return text;
}

function visible(piece) {
  if (typeof piece === "number") return `${piece} `;
  return piece === "" ? "·" : piece.replaceAll("\n", "↵\n").replaceAll("\t", "→\t");
}

function describe(rollout, place, versions, kinds, skipped) {
  const logprob = rollout.logprobs[place], piece = rollout.pieces[place];
  const name = typeof piece === "number" ? `id ${piece}` : piece === "" ? "no text of its own" : JSON.stringify(piece);
  const head = `token ${place + skipped + 1} of ${rollout.length}: ${name}`;
  if (kinds[place] === "observed") return `${head}\nwritten by the environment, not sampled`;
  return [head, `log-probability ${short(logprob)} (${logprob === null ? "–" : short(100 * Math.exp(logprob))}%)`,
    `version ${versions[place]}, ${rollout.step - 1 - versions[place]} behind the learner`,
    `advantage ${short(rollout.advantage)}`, ...(kinds[place] === "masked" ? ["not seen by the loss"] : [])].join("\n");
}

/** Hover, tap and the arrow keys show what is known of a token. */
function interactive(text, spans, describeToken) {
  const places = new Map(spans.map((span, place) => [span, place]));
  let selected = null;
  const select = (span) => {
    selected?.classList.remove("selected");
    selected = span;
    if (!span) return hideTip();
    span.classList.add("selected");
    const box = span.getClientRects()[0] || span.getBoundingClientRect();
    showTip(describeToken(places.get(span)), box.left, box.bottom - 14);
  };
  text.onpointerover = text.onclick = (event) => places.has(event.target) && select(event.target);
  text.onpointerleave = (event) => event.pointerType === "mouse" && select(null);
  text.onblur = () => select(null);
  text.onkeydown = (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") select(null);
    if (!move) return;
    event.preventDefault();
    select(spans[Math.min(spans.length - 1, Math.max(0, (places.get(selected) ?? -1) + move))]);
  };
}
