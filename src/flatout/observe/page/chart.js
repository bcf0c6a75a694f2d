/* Curves as SVG: axes, lines, a read-out under the pointer, and one zoom for all of them.
   SVG takes its colours from the style sheet, so dark, light and paper need no drawing of their own.
   Text is only ever set as textContent. */

// --- curves ----------------------------------------------------------------------------------------------------------

/* What was sent, as numbers: NaN and infinity came as text, tokens perhaps as a factor. */
function unpack(curve) {
  const words = { nan: NaN, inf: Infinity, "-inf": -Infinity };
  return {
    s: curve.s,
    t: typeof curve.t === "number" ? curve.s.map((step) => step * curve.t) : curve.t,
    e: curve.e,
    v: curve.v.map((value) => (typeof value === "string" ? words[value] : value)),
  };
}

function lowerBound(values, wanted) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearest(values, wanted) {
  const index = Math.min(lowerBound(values, wanted), values.length - 1);
  return index > 0 && wanted - values[index - 1] < values[index] - wanted ? index - 1 : index;
}

function quantile(sorted, share) {
  return sorted[Math.round(share * (sorted.length - 1))];
}

/* One panel. `view` is shared by all: axis, zoom, switches, hidden runs, and the place of the read-out. */
class Chart {
  constructor(panel, view) {
    this.panel = panel;
    this.view = view;
    this.keys = make("div", { class: "keys" });
    this.svg = draw("svg", { role: "presentation" });
    this.readout = make("div", { class: "readout", hidden: true });
    this.plot = make("div", { class: "plot", tabindex: "0", role: "group" }, this.svg, this.readout);
    this.element = make("figure", { class: "chart" + (panel.wide ? " wide" : ""), id: "chart-" + panel.id },
      make("figcaption", {}, make("h3", {}, panel.title), this.keys), this.plot);
    this.listen();
  }

  /* The curves to draw: of every visible run, every kind of line of this panel. */
  lines(runs) {
    const many = runs.length > 1;
    const found = [];
    runs.forEach((run, number) => {
      if (this.view.hidden.has(number)) return;
      this.panel.lines.forEach((line, place) => {
        const curve = run.unpacked[line.key];
        if (!curve || (many && line.onlyAlone)) return;
        const smooth = this.view.smooth ? run.unpacked[line.key + "_smooth"] : null;
        const colour = (many ? number : place) % 8;
        const dash = line.dash || runDash(many ? number : place);
        found.push(
          {
            run, number, curve, smooth: smooth || null, colour, dash, dots: line.dots, name: line.name,
            brief: line.brief, many
          }
        );
      });
    });
    return found;
  }

  has(runs) {
    if (this.panel.onlyMany && runs.length < 2) return false;
    return runs.some((run) => this.panel.lines.some((line) => run.unpacked[line.key]));
  }

  range(lines) {
    const { axis, zoom } = this.view;
    const clips = this.view.clip && this.panel.outliers;
    let [low, high] = [Infinity, -Infinity];
    for (const { curve, smooth } of lines) {
      const xs = curve[axis];
      const [from, to] = zoom ? [
        Math.max(0, lowerBound(xs, zoom[0]) - 1), lowerBound(xs, zoom[1]) + 1
      ] : [0, xs.length];
      let seen = curve.v.slice(from, to).filter((value) => Number.isFinite(value) && (!this.log || value > 0));
      if (!seen.length) continue;
      seen.sort((a, b) => a - b);
      let [least, most] = [seen[0], seen[seen.length - 1]];
      if (clips && seen.length >= 20) {
        const [small, large] = [quantile(seen, 0.03), quantile(seen, 0.97)];
        const room = 0.6 * (large - small) + 1e-12 * Math.abs(large);
        least = Math.max(least, small - room);
        most = Math.min(most, large + room);
      }
      [low, high] = [Math.min(low, least), Math.max(high, most)];
    }
    if (low > high) return null;
    for (const level of this.levels(lines)) [low, high] = [Math.min(low, level), Math.max(high, level)];
    if (this.log) {
      const room = (high / low) ** 0.04;
      return low === high ? [low / 1.5, high * 1.5] : [low / room, high * room];
    }
    if (this.panel.zero && low > 0) low = 0;
    if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
    const room = (high - low) * 0.05;
    return [this.panel.zero && low === 0 ? 0 : low - room, high + room];
  }

  /* What the curves are held against: the contexts of their runs. */
  levels(lines) {
    const contexts = this.panel.level ? lines.map(({ run }) => run.eigenstates && run.eigenstates.context) : [];
    return [...new Set(contexts)].filter((context) => context > 0);
  }

  reach(lines) {
    if (this.view.zoom) return this.view.zoom;
    let [low, high] = [Infinity, -Infinity];
    for (const { run } of lines) [low, high] = [
      Math.min(low, run.reach[this.view.axis][0]), Math.max(high, run.reach[this.view.axis][1])
    ];
    return low > high ? [0, 1] : low === high ? [low - 0.5, high + 0.5] : [low, high];
  }

  paint(runs) {
    this.runs = runs;
    this.element.hidden = !this.has(runs);
    if (this.element.hidden) return;
    const lines = (this.drawn = this.lines(runs));
    const { axis } = this.view;
    this.log = (this.view.log || this.panel.log) && lines.some(({ curve }) => curve.v.some((value) => Number.isFinite(value) && value > 0));
    const width = Math.max(220, Math.floor(this.plot.clientWidth) || 560);
    const height = this.panel.wide ? (width < 560 ? 260 : 330) : 205;
    const bounds = this.range(lines) || [0, 1];
    const yTicks = (this.log ? logTicks : linearTicks)(
      this.panel.kind, bounds[0], bounds[1], Math.round((height - 44) / (this.panel.wide ? 46 : 36))
    );
    const left = 12 + 6.7 * Math.max(3, ...yTicks.map(([, text]) => text.length));
    const box = (this.box = { left, top: 8, right: width - 14, bottom: height - 36 });
    const reach = this.reach(lines);
    const x = (this.x = scaleOf(reach[0], reach[1], box.left, box.right, false));
    const [foot, head] = this.panel.flipped ? [box.top, box.bottom] : [box.bottom, box.top];
    const y = (this.y = scaleOf(bounds[0], bounds[1], foot, head, this.log));
    const count = Math.max(2, Math.floor((box.right - box.left) / (width < 480 ? 62 : 84)));
    const xTicks = (
      AXES[axis].kind === "clock" ? clockTicks : linearTicks.bind(null, AXES[axis].kind)
    )(reach[0], reach[1], count);

    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", "0 0 " + width + " " + height);
    const back = draw("g");
    for (const [value, text] of yTicks) {
      const at = y(value).toFixed(1);
      back.append(draw("line", { class: "grid", x1: box.left, x2: box.right, y1: at, y2: at }));
      back.append(draw("text", { class: "tick-y", x: box.left - 7, y: Number(at) + 4, "text-anchor": "end" }, text));
    }
    for (const [value, text] of xTicks) {
      const at = x(value);
      back.append(draw("line", { class: "axis", x1: at, x2: at, y1: box.bottom, y2: box.bottom + 4 }));
      const anchor = at > width - 30 ? "end" : "middle";
      back.append(
        draw(
          "text", { class: "tick-x", x: anchor === "end" ? width - 2 : at, y: box.bottom + 17, "text-anchor": anchor },
          text
        )
      );
    }
    back.append(draw("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    back.append(
      draw(
        "text", { class: "axis-name", x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle" },
        AXES[axis].name
      )
    );
    this.svg.append(back);

    const inner = draw(
      "svg", { x: box.left, y: 0, width: Math.max(1, box.right - box.left), height: box.bottom + 1, overflow: "hidden" }
    );
    const shifted = (value) => x(value) - box.left;
    this.paintResumes(inner, lines, shifted);
    this.paintLevels(inner, lines);
    for (const line of lines) if (line.smooth) this.paintCurve(inner, line.curve, line, "raw", shifted, true);
    for (const line of lines) {
      this.paintCurve(inner, line.smooth || line.curve, line, "curve", shifted, !line.smooth);
      if (line.dots) this.paintDots(inner, line, shifted);
    }
    this.over = draw("g");
    this.select = draw("rect", { class: "select", y: box.top, height: box.bottom - box.top, width: 0 });
    this.svg.append(inner, this.select, this.over);
    this.paintKeys(lines);
    this.plot.setAttribute("aria-label", this.panel.title + " by " + AXES[axis].name +
      ". Arrow keys move the read-out, plus and minus zoom, Escape shows everything.");
    this.showPlace();
  }

  paintCurve(parent, curve, line, kind, x, marks) {
    const { zoom, axis } = this.view;
    const xs = curve[axis];
    const from = zoom ? Math.max(0, lowerBound(xs, zoom[0]) - 1) : 0;
    const to = zoom ? Math.min(xs.length, lowerBound(xs, zoom[1]) + 2) : xs.length;
    const steps = [];
    const beyond = new Map();
    const bad = new Map();
    let pen = false;
    for (let index = from; index < to; index++) {
      const value = curve.v[index];
      const at = x(xs[index]);
      if (!Number.isFinite(value) || (this.log && value <= 0)) {
        pen = false;
        if (!Number.isFinite(value)) bad.set(Math.round(at / 4), [at, value]);
        continue;
      }
      const height = this.y(value);
      if (marks && (height < this.box.top - 1 || height > this.box.bottom + 1)) beyond.set(
        Math.round(at / 5) + (height < 0 ? "u" : "d"), [at, height]
      );
      steps.push((pen ? "L" : "M") + at.toFixed(1) + " " + Math.max(-4000, Math.min(8000, height)).toFixed(1));
      pen = true;
    }
    const dash = line.dash ? " " + line.dash : "";
    parent.append(draw("path", { class: kind + " run-" + line.colour + dash, d: steps.join("") }));
    if (steps.length === 1 && !line.dots) this.paintDots(parent, { ...line, curve }, x);
    if (!marks) return;
    for (const [at, height] of beyond.values()) {
      const up = height < this.box.top;
      const edge = up ? this.box.top : this.box.bottom;
      const tip = up ? -5 : 5;
      parent.append(
        draw(
          "path",
          {
            class: "outlier fill-" + line.colour,
            d: "M" + (at - 3.5) + " " + (edge - tip) + "h7L" + at + " " + edge + "z"
          }
        )
      );
    }
    for (const [at, value] of bad.values()) this.paintBad(parent, at, value);
  }

  /* Not a number, or infinite: a red cross at the upper edge, which no scale can hide. */
  paintBad(parent, at, value) {
    const top = this.box.top + (value === -Infinity ? this.box.bottom - this.box.top - 12 : 4);
    parent.append(draw("path", { class: "bad", d: "M" + (at - 4) + " " + top + "l8 8m0 -8l-8 8" }));
  }

  paintDots(parent, line, x) {
    const xs = line.curve[this.view.axis];
    if (xs.length > 150) return;
    line.curve.v.forEach((value, index) => {
      if (!Number.isFinite(value) || (this.log && value <= 0)) return;
      parent.append(
        draw(
          "circle",
          {
            class: "fill-" + line.colour, cx: x(xs[index]).toFixed(1), cy: this.y(value).toFixed(1),
            r: xs.length > 60 ? 2 : 2.8
          }
        )
      );
    });
  }

  paintResumes(parent, lines, x) {
    const place = { s: 0, t: 1, e: 2 }[this.view.axis];
    let last = -Infinity;
    for (const run of new Set(lines.map((line) => line.run))) {
      for (const resume of run.resumes) {
        const at = x(resume[place]);
        if (at < 0 || at > this.box.right - this.box.left) continue;
        parent.append(draw("line", { class: "resume", x1: at, x2: at, y1: this.box.top, y2: this.box.bottom }));
        if (this.panel.wide && Math.abs(at - last) > 70) {
          const late = at > this.box.right - this.box.left - 60;
          parent.append(
            draw(
              "text",
              { class: "event", x: at + (late ? -5 : 5), y: this.box.top + 10, "text-anchor": late ? "end" : "start" },
              "resumed"
            )
          );
          last = at;
        }
      }
    }
  }

  paintLevels(parent, lines) {
    for (const level of this.levels(lines)) {
      const at = this.y(level);
      const under = at < this.box.top + 14;
      parent.append(
        draw("line", { class: "level", x1: 0, x2: this.box.right - this.box.left, y1: at, y2: at }),
        draw("text", { class: "event", x: 5, y: at + (under ? 13 : -5) }, "context " + shown("whole", level))
      );
    }
  }

  paintKeys(lines) {
    this.keys.replaceChildren();
    const many = this.runs.length > 1;
    const kinds = new Map();
    for (const line of lines) if (!kinds.has(line.name)) kinds.set(line.name, line);
    for (const [name, line] of kinds.size > 1 ? kinds : []) this.keys.append(
      make("span", {}, swatch(many ? null : line.colour, line.dash, line.dots), name)
    );
    const bad = lines.some(({ curve }) => curve.v.some((value) => !Number.isFinite(value)));
    if (bad) {
      const mark = draw(
        "svg", { class: "swatch", viewBox: "0 0 18 8" },
        draw("path", { class: "bad-key", d: "M5 0l8 8m0 -8l-8 8", stroke: "currentColor", "stroke-width": 1.8 })
      );
      this.keys.append(make("span", { class: "badkey" }, mark, "not finite"));
    }
  }

  // --- the read-out and the zoom ---

  /* Puts the read-out at the point that is nearest to `value` on the x axis. */
  point(value) {
    const lines = this.drawn || [];
    if (!lines.length) return;
    let found = null;
    for (const line of lines) {
      const xs = line.curve[this.view.axis];
      const index = nearest(xs, value);
      const far = Math.abs(xs[index] - value);
      if (!found || far < found.far - 1e-12) found = { far, line, index };
    }
    this.view.place = {
      chart: this, x: found.line.curve[this.view.axis][found.index], curve: found.line.curve, index: found.index
    };
    this.view.showPlace();
  }

  showPlace() {
    if (!this.over) return;
    this.over.replaceChildren();
    const place = this.view.place;
    if (!place || this.element.hidden) return void (this.readout.hidden = true);
    const at = this.x(place.x);
    if (at < this.box.left - 1 || at > this.box.right + 1) return void (this.readout.hidden = true);
    this.over.append(draw("line", { class: "cross", x1: at, x2: at, y1: this.box.top, y2: this.box.bottom }));
    const rows = [];
    for (const line of this.drawn) {
      const xs = line.curve[this.view.axis];
      const index = nearest(xs, place.x);
      const spot = this.x(xs[index]);
      const gap = line.dots ? 1e9 : 14;
      if (Math.abs(spot - at) > gap) continue;
      const value = line.curve.v[index];
      if (Number.isFinite(value) && !(this.log && value <= 0)) {
        const height = Math.max(this.box.top, Math.min(this.box.bottom, this.y(value)));
        if (spot >= this.box.left - 1 && spot <= this.box.right + 1) this.over.append(
          draw("circle", { class: "spot fill-" + line.colour, cx: spot, cy: height, r: 4.2 })
        );
      }
      rows.push({ line, index, value, away: Math.abs(spot - at) > 1.5 });
    }
    if (place.chart !== this) return void (this.readout.hidden = true);
    this.fillReadout(rows, place);
    const [wide, tall] = [this.readout.offsetWidth, this.readout.offsetHeight];
    const share = this.plot.clientWidth / (this.svg.viewBox.baseVal.width || 1);
    const right = at * share + 14 + wide <= this.plot.clientWidth;
    this.readout.style.left = Math.max(0, right ? at * share + 14 : at * share - 14 - wide) + "px";
    this.readout.style.top = Math.max(2, (this.box.bottom - tall) / 2 - 10) + "px";
  }

  fillReadout(rows, place) {
    const { curve, index } = place;
    this.readout.replaceChildren(make("div", { class: "where" }, "step " + shown("whole", curve.s[index]) + " · " +
      shown("plain", curve.t[index]) + " tokens · " + clock(curve.e[index])));
    const body = make("tbody");
    for (const { line, index: own, value, away } of rows.slice(0, 24)) {
      const several = this.panel.lines.length > 1;
      const name = line.many ? line.run.name + (several && line.brief ? ", " + line.brief : "") : line.name;
      const where = away ? " (step " + shown("whole", line.curve.s[own]) + ")" : "";
      body.append(
        make(
          "tr", {}, make("td", {}, swatch(line.colour, line.dash, line.dots)),
          make("td", { class: "name text" }, name + where),
          make("td", { class: "number" }, shown(this.panel.kind, value))
        )
      );
      if (line.smooth && !line.many) {
        const mean = line.smooth.v[nearest(line.smooth.s, line.curve.s[own])];
        body.append(
          make(
            "tr", {}, make("td", {}), make("td", { class: "name" }, "smoothed"),
            make("td", { class: "number" }, shown(this.panel.kind, mean))
          )
        );
      }
    }
    this.readout.append(make("table", {}, body));
    this.readout.hidden = false;
  }

  valueAt(event) {
    const share = (this.svg.viewBox.baseVal.width || 1) / (this.plot.clientWidth || 1);
    return this.x.back((event.clientX - this.plot.getBoundingClientRect().left) * share);
  }

  listen() {
    let from = null;
    const leave = () => {
      this.view.place = null;
      this.view.showPlace();
    };
    this.plot.addEventListener("pointerdown", (event) => {
      if (!this.x) return;
      if (event.pointerType === "touch") this.point(this.valueAt(event));
      else if (event.button === 0) {
        from = this.valueAt(event);
        this.plot.setPointerCapture(event.pointerId);
      }
    });
    this.plot.addEventListener("pointermove", (event) => {
      if (!this.x) return;
      if (from !== null) this.showSelection(from, this.valueAt(event));
      this.point(this.valueAt(event));
    });
    this.plot.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const [a, b] = [from, this.valueAt(event)].sort((one, two) => one - two);
      from = null;
      this.select.setAttribute("width", 0);
      if (this.x(b) - this.x(a) > 6) this.view.setZoom(
        [Math.max(a, this.x.back(this.box.left)), Math.min(b, this.x.back(this.box.right))]
      );
    });
    this.plot.addEventListener("pointercancel", () => {
      from = null;
      this.select && this.select.setAttribute("width", 0);
    });
    this.plot.addEventListener("pointerleave", (event) => event.pointerType === "touch" || leave());
    this.plot.addEventListener("blur", leave);
    this.plot.addEventListener("dblclick", () => this.view.setZoom(null));
    this.plot.addEventListener("wheel", (event) => {
      if (!(event.ctrlKey || event.metaKey) || !this.x) return; // a plain wheel scrolls the page, as everywhere
      event.preventDefault();
      this.view.scaleZoom(event.deltaY > 0 ? 1.3 : 1 / 1.3, this.valueAt(event));
    }, { passive: false });
    this.plot.addEventListener("keydown", (event) => {
      const jump = event.shiftKey ? 10 : 1;
      const act = {
        ArrowLeft: () => this.walk(-jump),
        ArrowRight: () => this.walk(jump),
        "+": () => this.view.scaleZoom(0.5, this.placeX()),
        "=": () => this.view.scaleZoom(0.5, this.placeX()),
        "-": () => this.view.scaleZoom(2, this.placeX()),
        Escape: () => (this.view.setZoom(null), leave()),
        0: () => this.view.setZoom(null),
      }[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    });
  }

  placeX() {
    return this.view.place ? this.view.place.x : undefined;
  }

  walk(steps) {
    const line = this.drawn && this.drawn[0];
    if (!line) return;
    const xs = line.curve[this.view.axis];
    const start = this.view.place ? nearest(xs, this.view.place.x) : nearest(
      xs, this.x.back((this.box.left + this.box.right) / 2)
    ) - steps;
    this.point(xs[Math.max(0, Math.min(xs.length - 1, start + steps))]);
  }

  showSelection(from, to) {
    const [a, b] = [this.x(from), this.x(to)].sort((one, two) => one - two);
    const left = Math.max(this.box.left, a);
    this.select.setAttribute("x", left);
    this.select.setAttribute("width", Math.max(0, Math.min(this.box.right, b) - left));
  }
}

/* Colours come eight at a time; beyond that, lines differ by their strokes. */
function runDash(number) {
  return ["", "dotted", "dashdot"][Math.floor(number / 8) % 3];
}

function swatch(colour, dash, dots) {
  const line = draw(
    "line",
    {
      class: (colour === null ? "neutral" : "run-" + colour) + (dash ? " " + dash : ""), x1: 0, x2: 18, y1: 4, y2: 4,
      stroke: colour === null ? "currentColor" : null,
      "stroke-dasharray": { dashed: "5 3", dotted: "2 3", dashdot: "7 3 2 3" }[dash]
    }
  );
  const dot = dots ? draw(
    "circle",
    {
      class: colour === null ? "" : "fill-" + colour, fill: colour === null ? "currentColor" : null, cx: 9, cy: 4, r: 3
    }
  ) : null;
  return draw("svg", { class: "swatch", viewBox: "0 0 18 8", "aria-hidden": "true" }, line, dot);
}
