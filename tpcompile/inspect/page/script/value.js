// A line of a graph, the values in it, and all that is known of the one that was chosen.

function lineElement(line, how, mark, known) {
  if (line.kind === "code")
    return el(
      "div",
      { class: "line code", title: line.source[0] },
      el("span", { class: "dim", text: `${lineLabel(line.source)}  ` }),
      line.source[2],
    );
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
  if (line.type)
    made.append(el("span", { class: "dim", text: " : " }), el("span", { class: `type ${line.state ?? ""}` }, ...wordElements(line.type)));
  for (const sent of line.calls ?? []) made.append(" ", callChip(sent));
  if (line.op === "tpcompile.enter_later") made.append(" ", el("span", { class: "chip", text: "summed once a step" }));
  return made;
}

const wordElements = (text) => words(text).map((word) => el("span", { "data-word": true, text: word }));

function opElements(line) {
  const dot = line.op.indexOf(".");
  if (dot < 0 || line.kind === "return") return [el("span", { class: "op", "data-word": true, text: line.op })];
  return [
    el("span", { class: "op-space", text: line.op.slice(0, dot + 1) }),
    el("span", { class: "op", "data-word": true, text: line.op.slice(dot + 1) }),
  ];
}

const callChip = (sent) =>
  el("span", {
    class: "chip",
    title: `${sent.formula} bytes that a rank gives, in one micro-batch`,
    text: `${sent.call} ${sent.direction === "backward" ? "◂ backward" : "▸ forward"} ${bytes(sent.bytes)}`,
  });

/** A value's name: chosen by a click or by Enter, and marked wherever it stands while the pointer is on one. */
function valueElement(name, kind = "") {
  const parameter = parameterAt.has(name);
  return el("span", {
    class: ["value", parameter && "parameter", kind].filter(Boolean).join(" "),
    role: "button",
    tabindex: "0",
    "data-value": name,
    "data-word": true,
    title: parameter ? `%${name}` : undefined,
    text: shown(name, state.part),
  });
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

// -------------------------------------------------------------------------------------------- one value

/** All that is known of the chosen value. */
function dock() {
  const name = state.value;
  const shownIn = state.pass === EMIT ? data.passes.length - 1 : state.pass;
  const found = [shownIn, data.passes[shownIn].before, ...graphPasses.toReversed()]
    .map((pass) => lines(pass, state.part).find((line) => line.name === name))
    .find(Boolean);
  const close = button({ class: "close", text: "close", "aria-label": "close the value", on: { click: () => go({ value: "" }) } });
  const title = el(
    "div",
    { class: "title" },
    el("code", { class: found?.state, text: `%${name}` }),
    el("code", { class: "dim", text: found?.type ?? "" }),
    close,
  );
  if (!found)
    return el("aside", { class: "dock", id: "dock" }, title, el("p", { class: "dim", text: "No pass makes this value in this part." }));
  const operands = [...new Set(found.tokens.filter((token) => token.name && !/^\d+$/.test(token.name)).map((token) => token.name))];
  const users = parts.flatMap((part) =>
    lines(shownIn, part.index)
      .filter((line) => line.tokens.some((token) => token.name === name))
      .map((line) => line.name || line.kind),
  );
  const facts = el("dl", { class: "facts" });
  const fact = (term, ...what) => facts.append(el("dt", { text: term }), el("dd", {}, ...what));
  const parameter = parameterAt.get(name);
  if (parameter)
    fact(
      "parameter",
      button({ class: "link mono", text: parameter.full, on: { click: () => go({ view: "weights", weight: parameter.full }) } }),
    );
  if (found.op) fact("operation", el("code", { text: found.op }));
  if (operands.length)
    fact("made from", el("div", { class: "list" }, ...operands.map((one) => valueElement(one, states(shownIn).get(one)))));
  if (users.length)
    fact(
      "used by",
      el(
        "div",
        { class: "list" },
        ...[...new Set(users)].map((one) => (one === "return" ? "return" : valueElement(one, states(shownIn).get(one)))),
      ),
    );
  if (found.source !== undefined) {
    const source = data.lines[found.source];
    fact("line", el("span", { class: "dim", title: source[0], text: `${lineLabel(source)}  ` }), el("code", { text: source[2] }));
    fact(
      "module",
      el("code", {
        text: found.path.startsWith("/")
          ? found.path.slice(1)
          : [parts[state.part].name, found.path].filter(Boolean).join(".") || data.model,
      }),
    );
  }
  for (const sent of found.calls ?? [])
    fact("sends", callChip(sent), " ", el("code", { class: "dim", text: `${sent.formula} bytes given by a rank, for each micro-batch` }));
  return el(
    "aside",
    { class: "dock", id: "dock", "aria-label": "the chosen value" },
    title,
    el("div", { class: "columns" }, facts, throughPasses(name)),
  );
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
    list.append(
      el("dt", { text: passName(pass) }),
      el("dd", {}, line ? el("code", { class: line.state, text }) : el("span", { class: "dim", text: "is gone" })),
    );
  }
  return list;
}
