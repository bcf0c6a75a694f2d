/* The page: sections made from the data, curves that share one view, and news from the server where there is one.
   A section is made anew only when its own part of the data has changed, so zoom, scroll and open parts stay. */

const PANELS = [
  {
    id: "loss", title: "Loss", kind: "loss", wide: true,
    lines: [
      { key: "loss", name: "training" },
      { key: "val_loss", name: "validation", brief: "val", dash: "dashed", dots: true }
    ]
  },
  {
    id: "rate", title: "Learning rate", kind: "plain", zero: true,
    lines: [{ key: "learning_rate", name: "learning rate" }]
  },
  {
    id: "speed", title: "Tokens per second", kind: "plain", zero: true, outliers: true,
    lines: [{ key: "tokens_per_second", name: "tokens per second" }]
  },
  {
    id: "gradient", title: "Gradient norm", kind: "plain", outliers: true,
    lines: [{ key: "grad_norm", name: "gradient norm" }]
  },
  {
    id: "time", title: "Step time", kind: "seconds", zero: true, outliers: true,
    lines: [{ key: "step_seconds", name: "step time" }]
  },
  {
    id: "memory", title: "Memory", kind: "bytes", zero: true,
    lines: [
      { key: "memory", name: "peak so far" }, { key: "reserved", name: "held by torch", brief: "held", dash: "dashed" }
    ]
  },
  { id: "mfu", title: "MFU", kind: "percent", zero: true, outliers: true, lines: [{ key: "mfu", name: "MFU" }] },
  { id: "weights", title: "Parameter norm", kind: "plain", lines: [{ key: "parameter_norm", name: "parameter norm" }] },
  {
    id: "wait", title: "Waiting for data", kind: "seconds", zero: true, outliers: true,
    lines: [{ key: "data_seconds", name: "wait in a step" }]
  },
  {
    id: "bits", onlyMany: true, title: "Bits per byte", kind: "loss",
    lines: [{ key: "bits_per_byte", name: "validation", dots: true }]
  },
  { id: "scale", title: "Loss scale", kind: "plain", lines: [{ key: "loss_scale", name: "loss scale" }] },
];
const MACHINE_PANELS = [
  {
    id: "utilisation", title: "GPU utilisation", kind: "percent", zero: true,
    lines: [{ key: "utilisation", name: "utilisation" }]
  },
  { id: "power", title: "Power", kind: "watt", zero: true,
    lines: [{ key: "power", name: "power" }, { key: "power_limit", name: "limit", dash: "dashed", onlyAlone: true }] },
  { id: "temperature", title: "Temperature", kind: "celsius", lines: [{ key: "temperature", name: "temperature" }] },
  { id: "clock", title: "Clock", kind: "megahertz", zero: true, lines: [{ key: "clock", name: "clock" }] },
  {
    id: "card", title: "Card memory, all processes", kind: "bytes", zero: true,
    lines: [{ key: "card_memory", name: "in use" }]
  },
  {
    id: "cores", title: "Host cores in use", kind: "plain", zero: true,
    lines: [{ key: "cores_busy", name: "by everybody" }, { key: "cores_others", name: "by others", dash: "dashed" }]
  },
  { id: "load", title: "Host load", kind: "plain", zero: true, lines: [{ key: "load", name: "load" }] },
  {
    id: "process", title: "Host memory of the run", kind: "bytes", zero: true,
    lines: [{ key: "process_memory", name: "in use" }]
  },
];

/* Their lines are the layers of the run, or of several runs a median over layers each. */
const EIGENSTATE_PANELS = [
  { id: "horizon", title: "Memory horizon, tokens", kind: "plain", wide: true, log: true, level: true, lines: [] },
  { id: "magnitude", title: "|λ|", kind: "magnitude", log: true, flipped: true, lines: [] },
  { id: "period", title: "Period, tokens per turn", kind: "plain", log: true, lines: [] },
];

const byId = (id) => document.getElementById(id);
const page = { data: null, parts: new Map() };

// --- the view that all curves share ----------------------------------------------------------------------------------

const view = {
  axis: "s", zoom: null, log: false, smooth: true, clip: true, hidden: new Set(), place: null, charts: [],
  waiting: false,

  repaint() {
    if (view.waiting) return;
    view.waiting = true;
    requestAnimationFrame(() => {
      view.waiting = false;
      view.paintNow();
    });
  },
  paintNow() {
    for (const chart of view.charts) chart.paint(page.data.runs);
    for (const grid of document.querySelectorAll(".charts")) evenOut([...grid.children]);
    for (const button of document.querySelectorAll(".reset")) button.disabled = view.zoom === null;
  },
  showPlace() {
    for (const chart of view.charts) chart.showPlace();
  },
  whole() {
    const shown = page.data.runs.filter((_, number) => !view.hidden.has(number));
    const ends = shown.map((run) => run.reach[view.axis]);
    return [Math.min(...ends.map((end) => end[0])), Math.max(...ends.map((end) => end[1]))];
  },
  setZoom(zoom) {
    const [low, high] = view.whole();
    if (zoom && zoom[1] - zoom[0] < (high - low) * 1e-6) return;
    view.zoom = zoom && zoom[0] <= low && zoom[1] >= high ? null : zoom;
    view.repaint();
  },
  scaleZoom(factor, around) {
    const [low, high] = view.whole();
    const [from, to] = view.zoom || [low, high];
    const middle = around === undefined ? (from + to) / 2 : around;
    const next = [Math.max(low, middle - (middle - from) * factor), Math.min(high, middle + (to - middle) * factor)];
    if (next[1] > next[0]) view.setZoom(next);
  },
  /* Another x axis shows the same stretch of the run. */
  setAxis(axis) {
    if (view.zoom) {
      const run = page.data.runs.find((each, number) => !view.hidden.has(number) && each.unpacked.loss);
      view.zoom = run ? view.zoom.map((value) => between(run.unpacked.loss, view.axis, axis, value)) : null;
    }
    view.place = null;
    view.axis = axis;
    view.repaint();
  },
};

/* Of an odd number of small charts the last one takes the whole row. */
function evenOut(charts) {
  const small = charts.filter((chart) => !chart.hidden && !chart.classList.contains("wide"));
  charts.forEach((chart) => {
    const alone = small.length % 2 === 1 && chart === small[small.length - 1];
    if (chart.classList.contains("alone") === alone) return;
    chart.classList.toggle("alone", alone);
    view.repaint();
  });
}

function between(curve, from, to, value) {
  const index = Math.max(1, Math.min(curve[from].length - 1, lowerBound(curve[from], value)));
  const [a, b] = [curve[from][index - 1], curve[from][index]];
  const [c, d] = [curve[to][index - 1], curve[to][index]];
  return b === a ? c : c + ((value - a) / (b - a)) * (d - c);
}

/* Numbers of a run made ready for drawing, and how far it reaches on every axis. */
function prepare(run) {
  run.unpacked = {};
  for (const [name, curve] of Object.entries(run.curves)) run.unpacked[name] = unpack(curve);
  run.reach = {};
  for (const axis of Object.keys(AXES)) {
    const ends = Object.values(run.unpacked).map((curve) => curve[axis]);
    run.reach[axis] = ends.length ? [
      Math.min(...ends.map((xs) => xs[0])), Math.max(...ends.map((xs) => xs[xs.length - 1]))
    ] : [0, 1];
  }
}

// --- curves ----------------------------------------------------------------------------------------------------------

function toolbar() {
  const choice = (label, options, chosen, act) => {
    const buttons = options.map(([value, word]) => {
      const button = make(
        "button", { type: "button", "aria-pressed": String(value === chosen), "data-value": value }, word
      );
      button.addEventListener("click", () => {
        buttons.forEach((each) => each.setAttribute("aria-pressed", String(each === button)));
        act(value);
      });
      return button;
    });
    return make(
      "div", { class: "set", role: "group", "aria-label": label }, make("span", { class: "what" }, label),
      make("span", { class: "choice" }, buttons)
    );
  };
  const check = (id, label, name, title) => {
    const box = make("input", { type: "checkbox", id, checked: view[name] });
    box.addEventListener("change", () => {
      view[name] = box.checked;
      view.repaint();
    });
    return make("label", { title }, box, label);
  };
  const press = (word, label, act, kind) => {
    const button = make("button", { type: "button", "aria-label": label, class: kind }, word);
    button.addEventListener("click", act);
    return button;
  };
  return make(
    "div", { class: "tools" },
    choice(
      "X axis", Object.entries(AXES).map(([key, axis]) => [key, axis.label]), view.axis, (axis) => view.setAxis(axis)
    ),
    check("log", "Log y", "log", "Logarithmic y axis"),
    check(
      "smooth", "Smooth", "smooth",
      "The middle value of a hundredth of the run to either side, with the values themselves behind"
    ),
    check("clip", "Clip outliers", "clip", "Leave room for most values; what lies beyond is marked at the edge"),
    make(
      "div", { class: "set", role: "group", "aria-label": "Zoom" }, make("span", { class: "what" }, "Zoom"),
      press("+", "Zoom in", () => view.scaleZoom(0.5)), press("−", "Zoom out", () => view.scaleZoom(2)),
      press("Reset", "Show everything", () => view.setZoom(null), "reset")
    )
  );
}

function runLegend(runs) {
  if (runs.length < 2) return null;
  return make("div", {
    class: "legend", role: "group", "aria-label": "Runs, press to hide or show"
  }, runs.map((run, number) => {
    const button = make(
      "button", { type: "button", "aria-pressed": String(!view.hidden.has(number)) },
      swatch(number % 8, runDash(number), false), make("span", { class: "text" }, run.name)
    );
    button.addEventListener("click", () => {
      if (view.hidden.has(number)) view.hidden.delete(number);
      else if (view.hidden.size < runs.length - 1) view.hidden.add(number);
      button.setAttribute("aria-pressed", String(!view.hidden.has(number)));
      view.repaint();
    });
    return button;
  }));
}

function buildCurves(runs) {
  const section = byId("curves");
  const grid = make("div", { class: "charts" });
  // Where losses do not compare, bits per byte lead.
  const panels = page.data.apart ? [...PANELS].sort((a, b) => (b.id === "bits") - (a.id === "bits")) : PANELS;
  for (const panel of panels) {
    const chart = new Chart(panel, view);
    view.charts.push(chart);
    grid.append(chart.element);
  }
  section.append(
    toolbar(), runLegend(runs) || "", grid,
    make(
      "p", { class: "help" },
      "Hover or tap for values. Drag to zoom all curves, double-click to see everything again; ",
      make("kbd", {}, "Ctrl"), " and the wheel zoom as well. Dashed upright lines: the run was resumed there."
    )
  );
  const machine = make("div", { class: "charts" });
  for (const panel of MACHINE_PANELS) {
    const chart = new Chart(panel, view);
    view.charts.push(chart);
    machine.append(chart.element);
  }
  byId("machine").append(machine);
  const memory = make("div", { class: "charts" });
  for (const panel of EIGENSTATE_PANELS) {
    const chart = new Chart(panel, view);
    view.charts.push(chart);
    memory.append(chart.element);
  }
  byId("eigenstates").querySelector(".body").before(memory);
  new ResizeObserver(() => view.repaint()).observe(section);
}

// --- putting it together ---------------------------------------------------------------------------------------------

const SECTIONS = [
  { id: "figures", title: "Figures", show: showFigures, part: (run) => run.figures },
  { id: "curves", title: "Curves" },
  { id: "differences", title: "Differences", show: showDifferences, part: () => 0 },
  {
    id: "eigenstates", short: "Eigenstates", title: "What eigenstates remember", show: showEigenstates,
    part: (run) => run.eigenstates
  },
  { id: "speed", short: "Speed", title: "Speed and memory", show: showSpeed, part: (run) => run.speed },
  { id: "time", short: "Time", title: "Where the time went", show: showTime, part: (run) => run.time },
  { id: "machine", title: "Machine" },
  { id: "samples", title: "Samples", show: showSamples, part: (run) => run.samples },
  { id: "what", short: "What", title: "What was trained", show: showFacts, part: (run) => run.facts },
  { id: "switches", title: "Switches", show: showSwitches, part: (run) => run.switches },
  { id: "notices", title: "Notices", show: showNotices, part: (run) => run.notices },
  { id: "checkpoints", half: true, title: "Checkpoints", show: showCheckpoints, part: (run) => run.checkpoints },
  {
    id: "environment", half: true, title: "Environment", show: showEnvironment,
    part: (run) => [run.environment, run.starts]
  },
  {
    id: "reproduce", short: "Reproduce", title: "How to reproduce", show: showReproduce,
    part: (run) => [run.config, run.commands]
  },
];

/* Calls `make` only if this part of the data is not what was shown last. */
function whenChanged(id, part, change) {
  const now = JSON.stringify(part);
  if (page.parts.get(id) === now) return;
  page.parts.set(id, now);
  change();
}

function layerLines(runs, quantity) {
  if (runs.length > 1) return [{ key: quantity + "_middle", name: "median over layers", dots: true }];
  const layers = runs[0].eigenstates ? runs[0].eigenstates.layers : [];
  return layers.map(({ layer }) => ({ key: quantity + "_" + layer, name: "layer " + layer, dots: true }));
}

function update(data) {
  for (const panel of EIGENSTATE_PANELS) panel.lines = layerLines(data.runs, panel.id);
  whenChanged("curves", data.runs.map((run) => [run.curves, run.resumes]), () => {
    data.runs.forEach(prepare);
    page.data = data;
    view.repaint();
  });
  // Runs whose curves stayed keep what was made ready of them.
  if (page.data !== data) data.runs.forEach(
    (run, number) => Object.assign(
      run, { unpacked: page.data.runs[number].unpacked, reach: page.data.runs[number].reach }
    )
  );
  page.data = data;
  whenChanged(
    "top", [data.apart, data.runs.map((run) => [run.name, run.state, run.summary, run.warnings])],
    () => byId("overview").replaceChildren(...showTop(data))
  );
  for (const section of SECTIONS.filter((each) => each.show)) {
    whenChanged(section.id, [data.runs.map(section.part), data.differences], () => {
      const made = section.show(data);
      const body = byId(section.id).querySelector(".body");
      const open = [...body.querySelectorAll("details")].map((each) => each.open);
      body.replaceChildren(...[made].flat().filter((child) => child !== null));
      [...body.querySelectorAll("details")].forEach(
        (each, number) => number < open.length && (each.open = open[number])
      );
      setShown(section.id, body.childNodes.length > 0);
    });
  }
  const measured = data.runs.some(
    (run) => MACHINE_PANELS.some((panel) => panel.lines.some((line) => run.curves[line.key]))
  );
  setShown("machine", measured);
}

function setShown(id, shown) {
  byId(id).hidden = !shown;
  byId("to-" + id).hidden = !shown;
}

/* Asks the server for news, and says so when it does not answer. */
function follow(version) {
  const line = byId("live");
  const ask = async () => {
    let wait = 2000;
    if (!document.hidden) {
      try {
        const answer = await fetch("data.json?version=" + encodeURIComponent(version), { cache: "no-store" });
        if (answer.status === 200) {
          const news = await answer.json();
          version = news.version;
          update(news.data);
        } else if (answer.status !== 304) throw new Error(String(answer.status));
        const goes = page.data.runs.some((run) => run.state.goes_on);
        line.textContent = goes ? "Live: this page follows the run." : "Live: no run goes on; waiting for news.";
        line.classList.remove("lost");
        wait = goes ? 2000 : 5000;
      } catch {
        line.textContent = "The server does not answer. This is what it told last; asking again.";
        line.classList.add("lost");
        wait = 5000;
      }
    }
    setTimeout(ask, wait);
  };
  setTimeout(ask, 1000);
}

function start() {
  const data = JSON.parse(byId("data").textContent);
  byId("top").append(make("div", { id: "overview" }), make("div", { id: "live", class: "live", role: "status" }));
  byId("contents").append(
    make(
      "ul", {},
      SECTIONS.map(
        (section) => make(
          "li", { id: "to-" + section.id }, make("a", { href: "#" + section.id }, section.short || section.title)
        )
      )
    )
  );
  byId("main").classList.toggle("alone", data.runs.length === 1);
  for (const section of SECTIONS) {
    byId("main").append(
      make(
        "section", { id: section.id, class: section.half ? "half" : null, "aria-labelledby": section.id + "-title" },
        make("h2", { id: section.id + "-title" }, section.title), section.show ? make("div", { class: "body" }) : null
      )
    );
  }
  page.data = data;
  data.runs.forEach(prepare);
  buildCurves(data.runs);
  update(data);
  view.paintNow();
  if (data.live) follow(data.version || "");
  else byId("live").remove();
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((each) => (each.open = true));
    view.place = null;
    view.paintNow();
  });
  addEventListener("afterprint", () => closed.forEach((each) => (each.open = false)));
}

start();
