// A part of the model before and after a pass, side by side: lines that make the same value stand beside each other.

const same = (pass) => {
  if (pass === EMIT) return false;
  const before = data.passes[pass].before;
  return before !== null && data.passes[before].graph && data.passes[pass].graph && templates[before].get(state.part) === templates[pass].get(state.part);
};

let drawn = ""; // what the sides show: where that stays, they stay scrolled as they are

function drawGraph() {
  const before = document.querySelector(".sides")?.scrollTop ?? 0;
  const now = JSON.stringify([state.part, state.pass, state.changes, state.find]);
  const emitted = state.pass === EMIT;
  const given = emitted ? data.passes.length - 1 : data.passes[state.pass].before;
  const body = el("div", { class: "sides", tabindex: "0", "aria-label": "before and after" });
  if (emitted) body.append(...emittedSides(given));
  else body.append(...passSides(given));
  if (body.children.length > 500) body.classList.add("many");
  const view = el("div", { class: "graph" }, graphTop(), body, state.value && dock());
  $("view").replaceChildren(view);
  if (now === drawn) body.scrollTop = before;
  const chosen = body.querySelector(".line.selected") ?? body.querySelector(".line.found");
  if (chosen) chosen.scrollIntoView({ block: now === drawn ? "nearest" : "center" });
  drawn = now;
}

function graphTop() {
  const part = parts[state.part];
  const equal = equals(state.part);
  const title = el("h2", { class: "mono", text: part.label });
  const place = equal.indexOf(state.part);
  const step = (by, name) => button({ class: "step", text: name, disabled: equal[place + by] === undefined, "aria-label": by < 0 ? "previous equal layer" : "next equal layer", on: { click: () => go({ part: equal[place + by], value: "" }) } });
  const stages = stagesOf(state.part);
  const where = stages.length ? `stage${stages.length > 1 ? "s" : ""} ${ranges(stages)}` : "";
  const folded = equal.length > 1 && el("span", { class: "row-of" }, step(-1, "‹"), step(1, "›"), el("span", { class: "dim", text: `one of ${equal.length} equal layers: ${ranges(equal.map(number))}` }));
  const changes = el("label", { class: "row-of", style: "gap: 5px" }, el("input", { type: "checkbox", id: "changes", on: { change: () => go({ changes: !state.changes }) } }), "changed lines only");
  changes.firstChild.checked = state.changes;
  const passes = data.passes.map((pass, index) => passButton(index, `${whole(pass.count)} operations in the whole graph; the pass took ${pass.seconds.toFixed(2)} s`));
  if (data.sources.length) passes.push(passButton(EMIT, "the source that the ranks of this stage run"));
  return el("div", { class: "bar-top" },
    el("div", { class: "row-of" }, title, el("span", { class: "dim", text: where }), folded || null, legend(), changes),
    el("div", { class: "passes", role: "group", "aria-label": "passes" }, ...passes));
}

const passButton = (index, title) => button({ text: passName(index), title, class: same(index) ? "same" : undefined, "aria-pressed": String(state.pass === index), "data-pass": passName(index), on: { click: () => go({ pass: index }) } });

const legend = () => el("span", { class: "legend", style: "margin-left: auto" }, ...[["whole", "whole"], ["cut", "cut"], ["partial", "partial"]].map(([kind, text]) => el("span", {}, el("i", { class: kind }), text)), el("span", {}, el("span", { class: "chip", text: "collective" })));

// -------------------------------------------------------------------------------------------- both sides

function passSides(given) {
  const after = lines(state.pass, state.part);
  const pass = data.passes[state.pass];
  const first = given === null;
  const heads = el("div", { class: "heads" },
    el("div", {}, "before: ", el("b", { text: first ? "the model's lines" : passName(given) })),
    el("div", {}, "after: ", el("b", { text: pass.name }), pass.graph ? `  ${after.filter((line) => ["operation", "collective"].includes(line.kind)).length} of ${whole(pass.count)} operations` : ""));
  if (!after.length && !lines(given, state.part).length) return [heads, el("div", { class: "empty", text: "Nothing of this part is here." })];
  const before = lines(given, state.part);
  const pairs = first ? userLines(after) : pass.graph ? align(before, after) : told(before, after, data.passes[given].graph);
  return [heads, ...rowsShown(pairs, states(given), states(state.pass))];
}

/** The user's lines beside what was captured of them. */
function userLines(after) {
  let last = -1;
  return after.map((line) => {
    const source = line.source !== undefined && line.source !== last ? data.lines[line.source] : null;
    last = line.source ?? last;
    return { left: source && { kind: "code", source }, right: line, how: "equal" };
  });
}

/** What a pass found, each beside the value that it is about; where there are no values, two lists. */
function told(before, after, graph) {
  if (!graph) return Array.from({ length: Math.max(before.length, after.length) }, (_, place) => ({ left: before[place] ?? null, right: after[place] ?? null, how: "told" }));
  const about = Map.groupBy(after, (line) => line.tokens[0]?.name);
  const pairs = before.flatMap((line) => {
    const found = about.get(line.name) ?? [null];
    about.delete(line.name);
    return found.map((right, place) => ({ left: place ? null : line, right, how: right ? "told" : "equal" }));
  });
  return [...pairs, ...[...about.values()].flat().map((right) => ({ left: null, right, how: "told" }))];
}

/** Pairs of lines in order. Lines of the same value are a pair where their order is kept; others face what stands in the same gap. */
function align(before, after) {
  const key = (line) => line.name || `${line.kind} ${line.tokens.map((token) => token.name ?? token).join("")}`;
  const place = new Map(after.map((line, index) => [key(line), index]));
  const common = before.map((line, index) => [index, place.get(key(line))]).filter(([, other]) => other !== undefined);
  const pairs = [];
  let left = 0, right = 0;
  for (const [i, j] of [...increasing(common), [before.length, after.length]]) {
    while (left < i || right < j) {
      const pair = { left: left < i ? before[left++] : null, right: right < j ? after[right++] : null };
      pairs.push({ ...pair, how: "differs" });
    }
    if (i < before.length) {
      pairs.push({ left: before[i], right: after[j], how: textOf(before[i]) === textOf(after[j]) ? "equal" : "changed" });
      [left, right] = [i + 1, j + 1];
    }
  }
  return pairs;
}

/** The longest run of pairs that rises on both sides. */
function increasing(pairs) {
  const ends = [], from = [];
  pairs.forEach(([, value], index) => {
    let low = 0, high = ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (pairs[ends[middle]][1] < value) low = middle + 1;
      else high = middle;
    }
    from[index] = low ? ends[low - 1] : -1;
    ends[low] = index;
  });
  const kept = [];
  for (let index = ends.at(-1) ?? -1; index >= 0; index = from[index]) kept.push(pairs[index]);
  return kept.reverse();
}

function rowsShown(pairs, before, after) {
  const near = pairs.map((pair, index) => !state.changes || pairs.slice(Math.max(index - 2, 0), index + 3).some((one) => one.how !== "equal"));
  const rows = [];
  let hidden = 0;
  pairs.forEach((pair, index) => {
    if (!near[index]) {
      hidden++;
      return;
    }
    if (hidden) rows.push(el("div", { class: "skip", text: `${hidden} equal line${hidden > 1 ? "s" : ""}` }));
    hidden = 0;
    const both = [side(pair.left, pair, "removed", "−", before), side(pair.right, pair, "added", "+", after)];
    if (pair.how === "changed") {
      markChanges(both[0], both[1]);
      markChanges(both[1], both[0]);
    }
    rows.push(el("div", { class: "line-pair" }, ...both));
  });
  if (hidden) rows.push(el("div", { class: "skip", text: `${hidden} equal line${hidden > 1 ? "s" : ""}` }));
  return rows;
}

function side(line, pair, word, mark, known) {
  if (!line) return el("div", { class: ["equal", "told"].includes(pair.how) ? "line" : "line void" });
  const how = pair.how === "differs" ? word : pair.how === "changed" ? "changed" : "";
  return lineElement(line, how, how === word ? mark : how ? "~" : "", known);
}

/** A text in words and what is between them. */
const words = (text) => text.match(/[\w@·{}:.+|-]+|[^\w@·{}:.+|-]+/g) ?? [];

/** Mark the words of a line that the other line of its value does not have, in their order. */
function markChanges(made, other) {
  const own = [...made.querySelectorAll("[data-word]")];
  const its = [...other.querySelectorAll("[data-word]")].map((word) => word.textContent);
  const longest = own.map(() => new Uint16Array(its.length + 1));
  longest.push(new Uint16Array(its.length + 1));
  for (let i = own.length - 1; i >= 0; i--) {
    for (let j = its.length - 1; j >= 0; j--) longest[i][j] = own[i].textContent === its[j] ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
  }
  for (let i = 0, j = 0; i < own.length; i++) {
    while (j < its.length && own[i].textContent !== its[j] && longest[i][j + 1] >= longest[i + 1][j] && longest[i][j + 1] === longest[i][j]) j++;
    if (j < its.length && own[i].textContent === its[j]) j++;
    else if (/\w/.test(own[i].textContent)) own[i].classList.add("differs");
  }
}

function lineElement(line, how, mark, known) {
  if (line.kind === "code") return el("div", { class: "line code", title: line.source[0] }, el("span", { class: "dim", text: `${lineLabel(line.source)}  ` }), line.source[2]);
  const made = el("div", { class: `line ${line.kind} ${how}`, "data-mark": mark || undefined, "data-name": line.name || undefined });
  if (line.name && line.name === state.value) made.classList.add("selected");
  if (state.find && line.op === state.find) made.classList.add("found");
  if (line.name) made.append(valueElement(line.name, `defined ${line.state ?? ""}`));
  if (line.op) made.append(line.name ? el("span", { class: "dim", text: line.kind === "return" ? " " : " = " }) : "", ...opElements(line));
  const call = line.op && line.name;
  if (call) made.append(el("span", { class: "dim", text: "(" }));
  else if (line.op) made.append(" ");
  for (const token of line.tokens) {
    if (typeof token === "string" || /^\d+$/.test(token.name)) made.append(...wordElements(token.name ?? token));
    else made.append(valueElement(token.name, known.get(token.name)));
  }
  if (call) made.append(el("span", { class: "dim", text: ")" }));
  if (line.type) made.append(el("span", { class: "dim", text: " : " }), el("span", { class: `type ${line.state ?? ""}` }, ...wordElements(line.type)));
  for (const sent of line.calls ?? []) made.append(" ", callChip(sent));
  if (line.op === "tpcompile.enter_later") made.append(" ", el("span", { class: "chip", text: "summed once a step" }));
  return made;
}

const wordElements = (text) => words(text).map((word) => el("span", { "data-word": true, text: word }));

function opElements(line) {
  const dot = line.op.indexOf(".");
  if (dot < 0 || line.kind === "return") return [el("span", { class: "op", "data-word": true, text: line.op })];
  return [el("span", { class: "op-space", text: line.op.slice(0, dot + 1) }), el("span", { class: "op", "data-word": true, text: line.op.slice(dot + 1) })];
}

const callChip = (sent) => el("span", { class: "chip", title: `${sent.formula} bytes that a rank gives, in one micro-batch`, text: `${sent.call} ${sent.direction === "backward" ? "◂ backward" : "▸ forward"} ${bytes(sent.bytes)}` });

/** A value's name: chosen by a click or by Enter, and marked wherever it stands while the pointer is on one. */
function valueElement(name, kind = "") {
  const parameter = parameterAt.has(name);
  return el("span", { class: ["value", parameter && "parameter", kind].filter(Boolean).join(" "), role: "button", tabindex: "0", "data-value": name, "data-word": true, title: parameter ? `%${name}` : undefined, text: shown(name, state.part) });
}

/** One listener for all values, however many lines there are. */
function chooseValue(event) {
  const name = event.target.closest?.("[data-value]")?.dataset.value;
  if (name === undefined || (event.type === "keydown" && event.key !== "Enter")) return;
  select(name);
}

function select(name) {
  const home = homeOf(name);
  go(home === undefined ? { value: name } : { value: name, part: home });
}

/** The part whose lines make a value: this one, if it does, else the first other one. */
function homeOf(name) {
  const pass = state.pass === EMIT ? data.passes.length - 1 : state.pass;
  const before = data.passes[pass].before;
  const has = (part) => [pass, before].some((one) => lines(one, part).some((line) => line.name === name));
  if (has(state.part)) return state.part;
  return parts.find((part) => has(part.index))?.index;
}

function markUses(event) {
  const name = event.target.closest?.("[data-value]")?.dataset.value;
  for (const one of document.querySelectorAll(".value.same-name")) if (one.dataset.value !== name) one.classList.remove("same-name");
  if (name) for (const one of document.querySelectorAll(`[data-value="${CSS.escape(name)}"]`)) one.classList.add("same-name");
}

// ------------------------------------------------------------------------------------------------ source

function emittedSides(given) {
  const stages = stagesOf(state.part);
  const stage = stages.at(-1) ?? 0;
  const heads = el("div", { class: "heads" }, el("div", {}, "before: ", el("b", { text: passName(given) })), el("div", {}, "after: ", el("b", { text: `stage_${stage}.py` }), "  what its ranks run"));
  const source = el("div", { class: "source line", style: "padding: 0; text-indent: 0" }, ...(data.sources[stage] ?? []).map((place) => data.code[place]).map((line, index) => el("div", { class: /^\s*#/.test(line) ? "comment" : undefined, "data-line": index + 1, text: line })));
  return [heads, el("div", { class: "line-pair" }, el("div", {}, ...lines(given, state.part).map((line) => lineElement(line, "", "", states(given)))), source)];
}

// -------------------------------------------------------------------------------------------- one value

/** All that is known of the chosen value. */
function dock() {
  const name = state.value;
  const shownIn = state.pass === EMIT ? data.passes.length - 1 : state.pass;
  const found = [shownIn, data.passes[shownIn].before, ...graphPasses.toReversed()].map((pass) => lines(pass, state.part).find((line) => line.name === name)).find(Boolean);
  const close = button({ class: "close", text: "close", "aria-label": "close the value", on: { click: () => go({ value: "" }) } });
  const title = el("div", { class: "title" }, el("code", { class: found?.state, text: `%${name}` }), el("code", { class: "dim", text: found?.type ?? "" }), close);
  if (!found) return el("aside", { class: "dock", id: "dock" }, title, el("p", { class: "dim", text: "No pass makes this value in this part." }));
  const operands = [...new Set(found.tokens.filter((token) => token.name && !/^\d+$/.test(token.name)).map((token) => token.name))];
  const users = parts.flatMap((part) => lines(shownIn, part.index).filter((line) => line.tokens.some((token) => token.name === name)).map((line) => line.name || line.kind));
  const facts = el("dl", { class: "facts" });
  const fact = (term, ...what) => facts.append(el("dt", { text: term }), el("dd", {}, ...what));
  const parameter = parameterAt.get(name);
  if (parameter) fact("parameter", button({ class: "link mono", text: parameter.full, on: { click: () => go({ view: "weights", weight: parameter.full }) } }));
  if (found.op) fact("operation", el("code", { text: found.op }));
  if (operands.length) fact("made from", el("div", { class: "list" }, ...operands.map((one) => valueElement(one, states(shownIn).get(one)))));
  if (users.length) fact("used by", el("div", { class: "list" }, ...[...new Set(users)].map((one) => (one === "return" ? "return" : valueElement(one, states(shownIn).get(one))))));
  if (found.source !== undefined) {
    const source = data.lines[found.source];
    fact("line", el("span", { class: "dim", title: source[0], text: `${lineLabel(source)}  ` }), el("code", { text: source[2] }));
    fact("module", el("code", { text: found.path.startsWith("/") ? found.path.slice(1) : [parts[state.part].name, found.path].filter(Boolean).join(".") || data.model }));
  }
  for (const sent of found.calls ?? []) fact("sends", callChip(sent), " ", el("code", { class: "dim", text: `${sent.formula} bytes given by a rank, for each micro-batch` }));
  return el("aside", { class: "dock", id: "dock", "aria-label": "the chosen value" }, title, el("div", { class: "columns" }, facts, throughPasses(name)));
}

/** The type of a value after every pass that changes it. */
function throughPasses(name) {
  const list = el("dl", { class: "facts" });
  let last = null;
  for (const pass of graphPasses) {
    const line = lines(pass, state.part).find((one) => one.name === name);
    const text = line ? `${line.op ? `${line.op} ` : ""}${line.type ?? ""}` : "";
    if (text === last || (!line && last === null)) continue;
    last = text;
    list.append(el("dt", { text: passName(pass) }), el("dd", {}, line ? el("code", { class: line.state, text }) : el("span", { class: "dim", text: "is gone" })));
  }
  return list;
}
