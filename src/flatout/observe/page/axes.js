/* Elements, numbers as text, and axes: what curves and tables stand on. Text is only ever set as textContent. */

const SVG = "http://www.w3.org/2000/svg";
const AXES = {
  s: { name: "step", label: "Steps", kind: "whole" },
  t: { name: "tokens", label: "Tokens", kind: "whole" },
  e: { name: "training time", label: "Time", kind: "clock" },
};

function make(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function draw(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(
      name, value === true ? "" : value
    );
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

// --- numbers as text -------------------------------------------------------------------------------------------------

function clock(seconds) {
  if (seconds < 0) return "-" + clock(-seconds);
  if (seconds < 1) return seconds === 0 ? "0s" : trimmed(seconds * 1000, 3) + "ms";
  if (seconds < 90) return trimmed(seconds, 3) + "s";
  const whole = Math.round(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600), Math.floor(whole / 60)];
  const two = (value) => String(value).padStart(2, "0");
  if (hours >= 48) return days + "d" + two(hours % 24) + "h";
  return hours ? hours + "h" + two(minutes % 60) + "m" : minutes + "m" + two(whole % 60) + "s";
}

/* The same on an axis, where most marks are whole minutes or hours. */
function clockTick(seconds) {
  if (seconds < 60 || seconds % 1) return clock(seconds);
  const [hours, minutes, rest] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
  if (hours >= 48) return clock(seconds).replace("d00h", "d");
  return (hours ? hours + "h" : "") + (minutes ? minutes + "m" : "") + (rest ? rest + "s" : "");
}

function trimmed(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

/* From which size on, the factor and the suffix of a unit; the largest first. */
const UNITS = {
  plain: [[1e12, 1e12, "T"], [1e9, 1e9, "B"], [1e6, 1e6, "M"], [1e4, 1e3, "k"], [0, 1, ""]],
  percent: [[0, 0.01, "%"]],
  bytes: [
    [2 ** 40, 2 ** 40, " TiB"], [2 ** 30, 2 ** 30, " GiB"], [2 ** 20, 2 ** 20, " MiB"], [2 ** 10, 2 ** 10, " KiB"],
    [0, 1, " B"]
  ],
  seconds: [[7200, 3600, " h"], [120, 60, " min"], [1, 1, " s"], [1e-3, 1e-3, " ms"], [0, 1e-6, " µs"]],
  watt: [[0, 1, " W"]],
  celsius: [[0, 1, " °C"]],
  megahertz: [[0, 1, " MHz"]],
};

/* The unit in which values up to `largest` read best: [factor, suffix]. */
function unitOf(kind, largest) {
  const size = Math.abs(largest);
  if (kind === "plain" && size > 0 && size < 0.01) {
    const power = Math.floor(Math.log10(size) + 1e-9);
    return [10 ** power, "e" + power];
  }
  return (UNITS[kind] || UNITS.plain).find(([from]) => size >= from).slice(1);
}

function shown(kind, value) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "+infinity" : "-infinity";
  if (kind === "clock") return clock(value);
  if (kind === "loss") return Math.abs(value) >= 1000 ? trimmed(value, 6) : value.toFixed(4);
  if (kind === "magnitude") return trimmed(1 - value, 12); // it comes as what it lacks to 1
  if (kind === "whole") return value.toLocaleString("en-US");
  const [factor, suffix] = unitOf(kind, value);
  return trimmed(value / factor, 4) + suffix;
}

// --- axes ------------------------------------------------------------------------------------------------------------

function niceStep(span, count) {
  const rough = span / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 2.5, 5, 10].find((factor) => rough <= factor * power * 1.0001) || 10);
}

/* The step for what is counted, of which there are no halves; `factor` is the unit's. */
function wholeStep(step, factor) {
  if (isWhole(step * factor)) return step;
  return (step * factor < 1 ? 1 : 5) / factor; // above 1, 2.5 is the only one that is not whole
}

/* As many digits as a step has, so that what is read off an axis is as far apart as its marks are. */
function decimalsOf(step) {
  let digits = 0;
  while (digits < 12 && !isWhole(step * 10 ** digits)) digits++;
  return digits;
}

function isWhole(value) {
  return Math.abs(value - Math.round(value)) <= 1e-6 * Math.abs(value);
}

function linearTicks(kind, low, high, count) {
  const [factor, suffix] = unitOf(kind === "loss" ? "plain" : kind, Math.max(Math.abs(low), Math.abs(high)));
  const nice = niceStep((high - low) / factor, count);
  const step = kind === "whole" ? wholeStep(nice, factor) : nice;
  const decimals = decimalsOf(step);
  const ticks = [];
  for (let index = Math.ceil(low / factor / step - 1e-9); index * step <= high / factor + step * 1e-9; index++) {
    const value = index * step;
    if (kind === "magnitude") ticks.push([value * factor, shown(kind, Number((value * factor).toPrecision(10)))]);
    else ticks.push(
      [value * factor, (Math.abs(value) < step / 1e6 ? "0" : value.toFixed(decimals)) + (value === 0 ? "" : suffix)]
    );
    if (ticks.length > 40) break;
  }
  return ticks;
}

const CLOCK_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

function clockTicks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  let step = CLOCK_STEPS.find((each) => each >= rough);
  if (rough < 1) step = niceStep(high - low, count);
  else if (!step) step = 86400 * Math.ceil(rough / 86400);
  const text = (seconds) => {
    if (step >= 1) return clockTick(Number(seconds.toPrecision(10)));
    return high < 1 ? (seconds * 1000).toFixed(decimalsOf(step * 1000)) + "ms" : seconds.toFixed(decimalsOf(step)) + "s";
  };
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9 && ticks.length < 40; index++) {
    ticks.push([index * step, index === 0 ? "0s" : text(index * step)]);
  }
  return ticks;
}

function logTicks(kind, low, high, count) {
  const decades = Math.log10(high / low);
  const marks = decades > count ? [1] : decades > count / 2 ? [1, 3] : decades > 0.9 ? [1, 2, 5] : [
    1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9
  ];
  const every = Math.max(1, Math.ceil(decades / Math.max(count, 1)));
  const unit = kind === "loss" ? "plain" : kind;
  const [factor, suffix] = unitOf(unit, high);
  // Over a few decades all marks have the unit of the largest; over more, small ones would be rows of zeros.
  const together = decades <= 3 && kind !== "magnitude" && !suffix.startsWith("e");
  const text = (value) => {
    if (together) return trimmed(value / factor, 4) + suffix;
    return unit === "plain" && high >= 1e4 && value >= 1e3 && value < 1e4 ? value / 1e3 + "k" : shown(unit, value);
  };
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += every) {
    for (const mark of marks) {
      const value = mark * 10 ** power;
      if (value >= low * 0.999999 && value <= high * 1.000001) ticks.push(
        [value, text(value)]
      );
    }
  }
  return ticks.length >= 2 ? ticks : linearTicks(kind, low, high, count);
}

function scaleOf(low, high, from, to, log) {
  const map = log ? Math.log : (value) => value;
  const [a, b] = [map(low), map(high)];
  const scale = (value) => from + ((map(value) - a) / (b - a || 1)) * (to - from);
  scale.back = (pixel) => {
    const value = a + ((pixel - from) / (to - from || 1)) * (b - a);
    return log ? Math.exp(value) : value;
  };
  return scale;
}
