// The pipeline's schedule as a timeline: a lane for each rank, a block for each run of a micro-batch on a stage.

const LANE = 26,
  GAP = 3,
  NAMES = 62;
const WORDS = { F: "forward", B: "backward", I: "backward for inputs", W: "backward for weights" };
const HOW = `A forward takes its stage's forward FLOPs, a backward twice as long, a half as long as a forward; what is sent takes no time.
Time is in forwards of a mean stage.`;
let zoom = 1;

function drawSchedule() {
  const { schedule } = data;
  const end = Math.max(...schedule.rows.flat().map((run) => run[4]), 1);
  const several = new Set(schedule.rows.flatMap((row) => row.map((run) => run[2]))).size > schedule.rows.length;
  const used = [...new Set(schedule.rows.flat().map((run) => run[0]))];
  const key = el(
    "span",
    { class: "legend key" },
    ...["F", "B", "I", "W"]
      .filter((work) => used.includes(work))
      .map((work) =>
        el(
          "span",
          {},
          el("i", { style: `background: var(--${{ F: "forward", B: "backward", I: "input", W: "weight" }[work]})` }),
          WORDS[work],
        ),
      ),
    el("span", {}, el("i", { style: "background: var(--void); box-shadow: inset 0 0 0 1px var(--line)" }), "idle"),
  );
  const holder = el("div", { class: "timeline", id: "timeline", tabindex: "0", "aria-label": "timeline" });
  const readOut = el("div", { class: "read-out", id: "run", text: "Point at a run; the same micro-batch is marked on all ranks." });
  const rescale = (by) => {
    zoom = Math.min(Math.max(zoom * by, 1), 64);
    paint();
  };
  const paint = () =>
    holder.replaceChildren(timeline(schedule.rows, end, several, Math.max(($("view").clientWidth - 60 - NAMES) * zoom, 200), readOut));
  const zoomers = el(
    "span",
    { class: "row-of", style: "margin-left: auto; gap: 4px" },
    button({ class: "step", text: "−", "aria-label": "shorter", on: { click: () => rescale(1 / 1.6) } }),
    button({ class: "step", text: "+", "aria-label": "longer", on: { click: () => rescale(1.6) } }),
  );
  const unhalved = data.stages.flatMap((stage, index) =>
    stage.unhalved && used.includes("W")
      ? [el("p", { class: "dim", text: `stage ${index}: backward is not halved, since ${stage.unhalved}` })]
      : [],
  );
  $("view").replaceChildren(
    el(
      "div",
      { class: "pad" },
      el(
        "div",
        { class: "row-of" },
        el("h2", { text: `${schedule.name}, ${schedule.microbatches} micro-batches` }),
        el("span", { class: "dim", text: `predicted: ${schedule.idle}` }),
        zoomers,
      ),
      holder,
      readOut,
      key,
      ...unhalved,
      el("p", {
        class: "dim",
        text: HOW,
      }),
      idleTable(schedule.rows, end),
    ),
  );
  paint();
}

function timeline(rows, end, several, width, readOut) {
  const scale = width / end;
  const drawn = svg("svg", {
    width: width + NAMES + 8,
    height: rows.length * (LANE + GAP) + 24,
    role: "img",
    "aria-label": `${rows.length} ranks`,
  });
  rows.forEach((row, rank) => {
    const y = 4 + rank * (LANE + GAP);
    drawn.append(svg("text", { x: 8, y: y + LANE / 2 }, `rank ${rank}`), svg("rect", { class: "lane", x: NAMES, y, width, height: LANE }));
    for (const work of new Set(row.map((run) => run[0]))) {
      const path = row
        .filter((run) => run[0] === work && run[4] > run[3])
        .map(
          ([, , , from, to]) =>
            `M${(NAMES + from * scale).toFixed(2)} ${y}h${((to - from) * scale).toFixed(2)}v${LANE}h${((from - to) * scale).toFixed(2)}z`,
        )
        .join("");
      drawn.append(svg("path", { class: `${work} edge`, d: path }));
    }
    for (const [work, microbatch, stage, from, to] of row) {
      const name = several ? `${stage}${work}${microbatch}` : `${work}${microbatch}`;
      if ((to - from) * scale > 7 * name.length + 2)
        drawn.append(svg("text", { class: "on", x: NAMES + ((from + to) / 2) * scale, y: y + LANE / 2 }, name));
    }
  });
  const marks = svg("path", { class: "same", d: "" });
  drawn.append(marks, ...axis(end, scale, rows.length));
  drawn.addEventListener("pointermove", (event) => point(event, drawn, rows, scale, marks, readOut));
  return drawn;
}

function* axis(end, scale, ranks) {
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((one) => one * scale > 48) ?? 1000;
  for (let time = 0; time <= end; time += step) yield svg("text", { x: NAMES + time * scale, y: ranks * (LANE + GAP) + 14 }, String(time));
}

/** The run under the pointer, in words; all runs of its micro-batch are marked. */
function point(event, drawn, rows, scale, marks, readOut) {
  const box = drawn.getBoundingClientRect();
  const rank = Math.floor((event.clientY - box.top - 4) / (LANE + GAP));
  const time = (event.clientX - box.left - NAMES) / scale;
  const run = rows[rank]?.find(([, , , from, to]) => from <= time && time < to);
  if (!run) {
    marks.setAttribute("d", "");
    if (rows[rank] && time >= 0) readOut.textContent = `rank ${rank} is idle at ${time.toFixed(2)}`;
    return;
  }
  const [work, microbatch, stage, from, to] = run;
  const when = `from ${from.toFixed(2)} to ${to.toFixed(2)}`;
  readOut.textContent = `rank ${rank}, stage ${stage}: ${WORDS[work]} of micro-batch ${microbatch}, ${when}`;
  marks.setAttribute(
    "d",
    rows
      .flatMap((row, place) =>
        row
          .filter((one) => one[1] === microbatch)
          .map(
            (one) =>
              `M${NAMES + one[3] * scale} ${4 + place * (LANE + GAP)}h${(one[4] - one[3]) * scale}v${LANE}h${(one[3] - one[4]) * scale}z`,
          ),
      )
      .join(""),
  );
}

function idleTable(rows, end) {
  const first = el(
    "tr",
    {},
    ...["rank", "stages", "works", "idle"].map((text, place) => el("th", { text, class: place > 1 ? "number" : undefined })),
  );
  return el(
    "table",
    { id: "idle" },
    first,
    ...rows.map((row, rank) => {
      const works = row.reduce((sum, run) => sum + run[4] - run[3], 0);
      return el(
        "tr",
        {},
        el("td", { text: rank }),
        el("td", { text: ranges([...new Set(row.map((run) => run[2]))].sort((a, b) => a - b)) }),
        el("td", { class: "number", text: works.toFixed(2) }),
        el("td", { class: "number", text: percent(1 - works / end) }),
      );
    }),
  );
}
