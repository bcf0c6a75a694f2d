/* The page: sections made from the data, curves that share one view, and news from the server where there is one.
   A section is made anew only when its own part of the data has changed, so zoom, scroll and open parts stay. */

/* A panel: its id, its title, the kind of its values, its lines as [key, name, more], and more of its own. */
function panel(id, title, kind, lines, more) {
  return { id, title, kind, lines: lines.map(([key, name, rest]) => ({ key, name, ...rest })), ...more };
}

const FROM_ZERO = { zero: true };
const SPIKY = { zero: true, outliers: true };
const DOTTED = { brief: "val", dash: "dashed", dots: true };
const PANELS = [
  panel("loss", "Loss", "loss", [["loss", "training"], ["val_loss", "validation", DOTTED]], { wide: true }),
  panel("rate", "Learning rate", "plain", [["learning_rate", "learning rate"]], FROM_ZERO),
  panel("speed", "Tokens per second", "plain", [["tokens_per_second", "tokens per second"]], SPIKY),
  panel("gradient", "Gradient norm", "plain", [["grad_norm", "gradient norm"]], { outliers: true }),
  panel("time", "Step time", "seconds", [["step_seconds", "step time"]], SPIKY),
  panel("memory", "Memory", "bytes",
    [["memory", "peak so far"], ["reserved", "held by torch", { brief: "held", dash: "dashed" }]], FROM_ZERO),
  panel("mfu", "MFU", "percent", [["mfu", "MFU"]], SPIKY),
  panel("weights", "Parameter norm", "plain", [["parameter_norm", "parameter norm"]]),
  panel("wait", "Waiting for data", "seconds", [["data_seconds", "wait in a step"]], SPIKY),
  panel("bits", "Bits per byte", "loss", [["bits_per_byte", "validation", { dots: true }]], { onlyMany: true }),
  panel("scale", "Loss scale", "plain", [["loss_scale", "loss scale"]]),
];
const MACHINE_PANELS = [
  panel("utilisation", "GPU utilisation", "percent", [["utilisation", "utilisation"]], FROM_ZERO),
  panel("power", "Power", "watt",
    [["power", "power"], ["power_limit", "limit", { dash: "dashed", onlyAlone: true }]], FROM_ZERO),
  panel("temperature", "Temperature", "celsius", [["temperature", "temperature"]]),
  panel("clock", "Clock", "megahertz", [["clock", "clock"]], FROM_ZERO),
  panel("card", "Card memory, all processes", "bytes", [["card_memory", "in use"]], FROM_ZERO),
  panel("cores", "Host cores in use", "plain",
    [["cores_busy", "by everybody"], ["cores_others", "by others", { dash: "dashed" }]], FROM_ZERO),
  panel("load", "Host load", "plain", [["load", "load"]], FROM_ZERO),
  panel("process", "Host memory of the run", "bytes", [["process_memory", "in use"]], FROM_ZERO),
];

/* Their lines are the layers of the run, or of several runs a median over layers each. */
const EIGENSTATE_PANELS = [
  panel("horizon", "Memory horizon, tokens", "plain", [], { wide: true, log: true, level: true }),
  panel("magnitude", "|λ|", "magnitude", [], { log: true, flipped: true }),
  panel("period", "Period, tokens per turn", "plain", [], { log: true }),
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
  const set = (label, ...children) => make("div", { class: "set", role: "group", "aria-label": label },
    make("span", { class: "what" }, label), children);
  const press = (word, label, act, kind) => {
    const button = make("button", { type: "button", "aria-label": label, class: kind }, word);
    button.addEventListener("click", act);
    return button;
  };
  const check = (name, label, title) => {
    const box = make("input", { type: "checkbox", id: name, checked: view[name] });
    box.addEventListener("change", () => {
      view[name] = box.checked;
      view.repaint();
    });
    return make("label", { title }, box, label);
  };
  const axes = Object.entries(AXES).map(([key, axis]) => {
    const state = { "aria-pressed": String(key === view.axis), "data-value": key };
    const button = make("button", { type: "button", ...state }, axis.label);
    button.addEventListener("click", () => {
      axes.forEach((each) => each.setAttribute("aria-pressed", String(each === button)));
      view.setAxis(key);
    });
    return button;
  });
  return make("div", { class: "tools" },
    set("X axis", make("span", { class: "choice" }, axes)),
    check("log", "Log y", "Logarithmic y axis"),
    check("smooth", "Smooth",
      "The middle value of a hundredth of the run to either side, with the values themselves behind"),
    check("clip", "Clip outliers", "Leave room for most values; what lies beyond is marked at the edge"),
    set("Zoom", press("+", "Zoom in", () => view.scaleZoom(0.5)), press("−", "Zoom out", () => view.scaleZoom(2)),
      press("Reset", "Show everything", () => view.setZoom(null), "reset")));
}

function runLegend(runs) {
  if (runs.length < 2) return "";
  const buttons = runs.map((run, number) => {
    const button = make("button", { type: "button", "aria-pressed": String(!view.hidden.has(number)) },
      swatch(number % 8, runDash(number), false), make("span", { class: "text" }, run.name));
    button.addEventListener("click", () => {
      if (view.hidden.has(number)) view.hidden.delete(number);
      else if (view.hidden.size < runs.length - 1) view.hidden.add(number);
      button.setAttribute("aria-pressed", String(!view.hidden.has(number)));
      view.repaint();
    });
    return button;
  });
  return make("div", { class: "legend", role: "group", "aria-label": "Runs, press to hide or show" }, buttons);
}

function buildCurves(runs) {
  const grid = (panels) => make("div", { class: "charts" }, panels.map((each) => {
    const chart = new Chart(each, view);
    view.charts.push(chart);
    return chart.element;
  }));
  // Where losses do not compare, bits per byte lead.
  const panels = page.data.apart ? [...PANELS].sort((a, b) => (b.id === "bits") - (a.id === "bits")) : PANELS;
  byId("curves").append(toolbar(), runLegend(runs), grid(panels), help(
    "Hover or tap for values. Drag to zoom all curves, double-click to see everything again; ",
    make("kbd", {}, "Ctrl"), " and the wheel zoom as well. Dashed upright lines: the run was resumed there."
  ));
  byId("machine").append(grid(MACHINE_PANELS));
  byId("eigenstates").querySelector(".body").before(grid(EIGENSTATE_PANELS));
  new ResizeObserver(() => view.repaint()).observe(byId("curves"));
}

// --- putting it together ---------------------------------------------------------------------------------------------

/* Each with what it shows of the data; a section is made anew when that changes. */
const SECTIONS = [
  { id: "figures", title: "Figures", show: showFigures, part: (run) => run.figures },
  { id: "curves", title: "Curves" },
  { id: "differences", title: "Differences", show: showDifferences, part: () => 0 },
  { id: "eigenstates", short: "Eigenstates", title: "What eigenstates remember", show: showEigenstates },
  { id: "speed", short: "Speed", title: "Speed and memory", show: showSpeed },
  { id: "tasks", title: "Tasks", show: showTasks, part: (run) => run.tasks },
  { id: "time", short: "Time", title: "Where the time went", show: showTime },
  { id: "machine", title: "Machine" },
  { id: "samples", title: "Samples", show: showSamples },
  { id: "what", short: "What", title: "What was trained", show: showFacts, part: (run) => run.facts },
  { id: "switches", title: "Switches", show: showSwitches },
  { id: "notices", title: "Notices", show: showNotices },
  { id: "checkpoints", half: true, title: "Checkpoints", show: showCheckpoints },
  { id: "environment", half: true, title: "Environment", show: showEnvironment,
    part: (run) => [run.environment] },
  { id: "reproduce", short: "Reproduce", title: "Config to train it again", show: showReproduce,
    part: (run) => [run.config] },
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
    whenChanged(section.id, [data.runs.map(section.part || ((run) => run[section.id])), data.differences], () => {
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
        line.textContent = "The server does not answer. This is its last answer; asking again.";
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
  const entry = (section) => make("li", { id: "to-" + section.id },
    make("a", { href: "#" + section.id }, section.short || section.title));
  byId("contents").append(make("ul", {}, SECTIONS.map(entry)));
  byId("main").classList.toggle("alone", data.runs.length === 1);
  for (const { id, title, half, show } of SECTIONS) {
    byId("main").append(make("section", { id, class: half ? "half" : null, "aria-labelledby": id + "-title" },
      make("h2", { id: id + "-title" }, title), show ? make("div", { class: "body" }) : null));
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
