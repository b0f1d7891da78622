// The three pictures: bars of contributions, the heat map, the trace. Every one has a table beside it.

import { count, element, score } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const MANY_SPLITS = 16; // rows are drawn thinner beyond this

function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Neighbouring splits get hues far apart; lightness follows the page's colour scheme.
export function splitColour(split, numSplits) {
  const hue = (245 + (360 / Math.min(numSplits, 8)) * 3 * split + 11 * Math.floor(split / 8)) % 360;
  return `oklch(var(--split-lightness) var(--split-chroma) ${hue})`;
}

// Contributions ---------------------------------------------------------------------------------

// What is added to a score after the last split, and its colour.
export const ADDED = { bias: "var(--quiet)", repeat: "var(--accent)", transition: "var(--good)", boost: "var(--ink)" };

// What an item's score is made of: [words, value, colour], in the order of the additions.
export function scoreParts(item) {
  const splits = item.contributions.map((value, split) =>
    [`split ${split}`, value, splitColour(split, item.contributions.length)]);
  const added = Object.entries(ADDED).map(([part, colour]) => [part, item[part], colour]);
  return [...splits, ...added.filter(([, value]) => value !== null)];
}

// How far bars reach to either side of zero, over all items that are shown together.
export function contributionRange(items) {
  const total = (item, sign) =>
    scoreParts(item).map(([, value]) => value).filter((value) => value * sign > 0)
      .reduce((sum, value) => sum + value, 0);
  return {
    low: Math.min(0, ...items.map((item) => total(item, -1))),
    high: Math.max(0, ...items.map((item) => total(item, 1))),
  };
}

// What lifts an item is stacked to the right of zero, what pulls it down to the left.
export function contributionBar(item, range) {
  const width = 1000;
  const scale = width / (range.high - range.low || 1);
  const zero = -range.low * scale;
  const svg = shape("svg", {
    viewBox: `0 0 ${width} 20`, preserveAspectRatio: "none", "aria-hidden": "true",
  });
  let right = zero;
  let left = zero;
  for (const [words, value, colour] of scoreParts(item)) {
    const length = Math.abs(value) * scale;
    const start = value >= 0 ? right : left - length;
    if (value >= 0) right += length;
    else left -= length;
    const bar = shape("rect", { x: start, y: 2, width: Math.max(length - 2, 0), height: 16 });
    bar.style.fill = colour;
    bar.append(shape("title", {}, `${words}: ${score(value)}`));
    svg.append(bar);
  }
  if (range.low < 0)
    svg.append(shape("line", { class: "zero", x1: zero, x2: zero, y1: 0, y2: 20 }));
  return svg;
}

// The heat map ----------------------------------------------------------------------------------

function ramp() {
  const style = getComputedStyle(document.documentElement);
  const stops = [0, 1, 2, 3, 4].map((stop) => {
    const hex = style.getPropertyValue(`--ramp-${stop}`).trim();
    return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  });
  return (value) => {
    const place = Math.min(Math.max(value, 0), 1) * (stops.length - 1);
    const below = Math.min(Math.floor(place), stops.length - 2);
    return stops[below].map((from, channel) =>
      Math.round(from + (stops[below + 1][channel] - from) * (place - below)));
  };
}

// Draws one row for each split and returns { visit, colour }: to show how many of its best sub-item
// ids were visited, and to draw again when the colour scheme changes.
export function heatMap(container, explanation, readout) {
  const { first_ranks: ranks, scores } = explanation.heat_map;
  const numSubItems = explanation.num_sub_items;
  const middleOf = (rank) => `${(100 * (rank + 0.5)) / numSubItems}%`;
  // One split may tower above the others: by rank, each colour is worn by as many scores.
  const all = Float64Array.from(scores.flat()).sort();
  const placeOf = (value) => {
    let [from, to] = [0, all.length];
    while (from < to) {
      const half = (from + to) >> 1;
      if (all[half] < value) from = half + 1;
      else to = half;
    }
    return from / (all.length - 1 || 1);
  };
  const rows = scores.map((row, split) => {
    const canvas = element("canvas");
    canvas.width = ranks.length;
    canvas.height = 1;
    const strip = element("div", "heat-strip", canvas);
    for (const [name, item] of marked(explanation)) {
      const mark = element("span", `mark ${name}`);
      mark.style.left = middleOf(item.sub_item_ranks[split]);
      strip.append(mark);
    }
    const bar = element("div");
    canvas.addEventListener("pointermove", (event) => {
      const across = event.offsetX / canvas.clientWidth;
      const column = Math.min(Math.max(Math.floor(across * ranks.length), 0), ranks.length - 1);
      readout(`split ${split}, rank ${count(ranks[column] + 1)}: score ${score(row[column])}`);
    });
    canvas.addEventListener("pointerleave", () => readout(""));
    const name = element("div", "heat-name", element("span", "word", "split "), String(split));
    const many = scores.length > MANY_SPLITS ? " many" : "";
    const strips = element("div", "", strip, element("div", "heat-visited", bar));
    return { canvas, bar, row, line: element("div", `heat-row${many}`, name, strips) };
  });
  const ends = element("div", "heat-axis", element("span", "", "best sub-item id"),
    element("span", "", `worst of ${count(numSubItems)}`));
  container.replaceChildren(...rows.map(({ line }) => line),
    element("div", "heat-row", element("div"), ends));

  function colour() {
    const colourOf = ramp();
    for (const { canvas, row } of rows) {
      // A few hundred pixels: not worth a way to the graphics card and back.
      const context = canvas.getContext("2d", { willReadFrequently: true });
      const pixels = context.createImageData(canvas.width, 1);
      row.forEach((value, column) => {
        pixels.data.set([...colourOf(placeOf(value)), 255], 4 * column);
      });
      context.putImageData(pixels, 0, 0);
    }
  }
  function visit(visited) {
    rows.forEach(({ bar }, split) => {
      bar.style.width = `${(100 * (visited?.[split] ?? 0)) / numSubItems}%`;
    });
  }
  colour();
  const quartiles = [0, 0.5, 1].map((part) => all[Math.round(part * (all.length - 1))]);
  return { colour, visit, quartiles };
}

export function marked(explanation) {
  const items = [["top", explanation.top[0]], ["middle", explanation.middle], ["bottom", explanation.bottom]];
  return items.filter(([, item]) => item);
}

// The trace -------------------------------------------------------------------------------------

function niceTicks(low, high, wanted) {
  const rough = (high - low || 1) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [];
  for (let tick = Math.ceil(low / step); tick * step <= high; tick += 1) ticks.push(tick * step);
  return { ticks, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

// Draws threshold and upper bound against step, with a cursor at one point.
export function traceChart(container, trace, current) {
  const width = container.clientWidth;
  const height = container.clientHeight;
  const edge = { left: 46, right: 14, top: 22, bottom: 34 };
  const points = trace.points;
  const values = points.flatMap((point) => [point.threshold, point.upper_bound])
    .filter((value) => value !== null);
  const low = values.length ? Math.min(...values) : 0;
  const high = values.length ? Math.max(...values) : 1;
  const pad = 0.06 * (high - low || 1);
  const across = (step) =>
    edge.left + ((width - edge.left - edge.right) * step) / (trace.steps || 1);
  const up = (value) =>
    height - edge.bottom -
    ((height - edge.top - edge.bottom) * (value - low + pad)) / (high - low + 2 * pad || 1);
  const place = (point, line) => `${across(point.step).toFixed(1)},${up(point[line]).toFixed(1)}`;
  const known = (line) => points.filter((point) => point[line] !== null);
  const path = (line) => {
    const places = known(line).map((point) => place(point, line));
    return places.length ? `M${places.join("L")}` : "M0,0";
  };
  const svg = shape("svg", { width, height });
  const { ticks, digits } = niceTicks(low - pad, high + pad, 7);
  for (const tick of ticks) {
    const y = up(tick);
    svg.append(shape("line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: y, y2: y }));
    svg.append(shape("text", { x: edge.left - 9, y: y + 4, "text-anchor": "end" },
      tick.toFixed(digits).replace("-", "−")));
  }
  const steps = niceTicks(0, trace.steps, Math.max(2, width / 110));
  for (const tick of steps.ticks.filter(Number.isInteger))
    svg.append(shape("text", { x: across(tick), y: height - 13, "text-anchor": "middle" }, count(tick)));
  svg.append(shape("text", { x: edge.left - 9, y: height - 13, "text-anchor": "end" }, "step"));

  const both = points.filter((point) => point.threshold !== null && point.upper_bound !== null);
  if (both.length > 1) {
    const there = both.map((point) => place(point, "upper_bound"));
    const back = both.map((point) => place(point, "threshold")).reverse();
    svg.append(shape("path", { class: "between", d: `M${[...there, ...back].join("L")}Z` }));
  }
  const end = across(trace.steps);
  svg.append(shape("line", { class: "stop", x1: end, x2: end, y1: edge.top - 4, y2: height - edge.bottom }));
  svg.append(shape("text", { class: "stop-words", x: end, y: edge.top - 9, "text-anchor": "end" },
    `stopped at step ${count(trace.steps)}`));
  for (const line of ["upper_bound", "threshold"])
    svg.append(shape("path", { class: line === "threshold" ? line : "bound", d: path(line) }));

  const now = points[current];
  const x = across(now.step);
  svg.append(shape("line", { class: "cursor", x1: x, x2: x, y1: edge.top, y2: height - edge.bottom }));
  for (const line of ["upper_bound", "threshold"])
    if (now[line] !== null)
      svg.append(shape("circle", { class: line === "threshold" ? line : "bound", cx: x, cy: up(now[line]), r: 5 }));
  container.replaceChildren(svg);
}
