// The explorer: asks one question and shows what happened inside.

import { ADDED, contributionBar, contributionRange, heatMap, marked, splitColour, traceChart } from "./charts.js";
import { itemPicker } from "./picker.js";
import { findItems, lookUp, Problem, readiness, recommend, useKey } from "./service.js";
import { count, duration, element, fillTable, itemName, score, share } from "./words.js";

const METHODS = {
  auto: "chooses for this query",
  cells: "visits items that share two good sub-item ids",
  scan: "filters every item, scores the few that are left",
  recjpqprune: "visits the best sub-item ids until nothing better can come",
  pqtopk: "scores every item from the sub-item scores",
  default: "multiplies with every item’s vector",
};
const MARKS = { top: "best", middle: "middle", bottom: "last" };

const at = (id) => document.getElementById(id);
const asker = () => document.querySelector("input[name=asker]:checked").value;
const say = (words) => { at("status").textContent = words; };

let redraw = () => {}; // what is shown, in the colours and sizes of now
let stopPlaying = () => {};
let explains = true; // a catalogue that changes is in pieces, which cannot be looked into

// The question ----------------------------------------------------------------------------------

const picker = itemPicker({
  input: at("item-search"), list: at("suggestions"), chosen: at("history"),
  find: findItems, look: lookUp, say,
});

// What is wrong with a condition stands under it, and the cursor where that begins. The service
// says, from 1 on, at which character; it counts whole ones, which here may be two units long.
function showConditionProblem(place, words) {
  const before = [...at("where").value].slice(0, place - 1).join("").length;
  at("where-problem").textContent = `At character ${place}: ${words}`;
  at("where-problem").hidden = false;
  at("where").setAttribute("aria-invalid", "true");
  at("where").focus();
  at("where").setSelectionRange(before, at("where").value.length);
}

function forgetConditionProblem() {
  at("where-problem").hidden = true;
  at("where").removeAttribute("aria-invalid");
}

function showProblem(problem) {
  const known = problem instanceof Problem;
  const condition = known && problem.message.match(/^Where, character (\d+): (.*)$/su);
  if (condition) {
    showConditionProblem(Number(condition[1]), condition[2]);
    return;
  }
  if (!known) console.error(problem);
  const words = known ? problem.message : "This page made a mistake; its console says more.";
  at("problem").replaceChildren(
    element("b", "", known ? problem.title : "Something went wrong"), `. ${words}`);
  at("problem").hidden = false;
  if (problem.status === 401) {
    at("by-key").hidden = false;
    at("key").focus();
  }
}

// Each as id=number: what is added to the score of an item. The number follows the last =.
function boosts() {
  const words = at("boosts").value.split(",").map((word) => word.trim()).filter(Boolean);
  return words.map((word) => {
    const equals = word.lastIndexOf("=");
    const [item, number] = [word.slice(0, equals).trim(), word.slice(equals + 1).trim()];
    if (equals > 0 && item && number && Number.isFinite(Number(number)))
      return { item, boost: Number(number) };
    at("boosts").focus();
    throw new Problem("Which boost?", `Give boosts as id=number, with commas between them, not as ${word}.`);
  });
}

// How many items may have the same value in a column; null where that is left open.
function atMost() {
  if (!at("at-most").value && !at("at-most").validity.badInput) return null;
  const number = Number(at("at-most").value);
  if (Number.isInteger(number) && number >= 1 && number <= 1000)
    return { column: at("at-most-column").value, count: number };
  at("at-most").focus();
  throw new Problem("At most how many?", "Give a whole number from 1 to 1,000, or none.");
}

async function question() {
  const k = Number(at("k").value);
  if (!Number.isInteger(k) || k < 1 || k > 100) {
    at("k").focus();
    throw new Problem("How many items?", "Give a whole number from 1 to 100.");
  }
  const rest = {
    k, exclude_seen: at("exclude-seen").checked, boosts: boosts(),
    where: at("where").value.trim() ? at("where").value : null, at_most: atMost(),
  };
  if (asker() === "user") {
    const user = at("user").value.trim();
    if (user) return { user, ...rest };
    at("user").focus();
    throw new Problem("Which user?", "Give the id of a user whose events this service knows.");
  }
  const missing = await picker.pickTyped();
  if (missing.length) {
    at("item-search").focus();
    throw new Problem(missing.length > 1 ? "Unknown items" : "Unknown item",
      `The catalogue has no item with the id ${missing.join(", ")}.`);
  }
  if (picker.picked.length) return { history: picker.picked.map((item) => item.item), ...rest };
  at("item-search").focus();
  throw new Problem("Nothing to go by", "Pick one item at least.");
}

// Asks, and shows either the answer or what went wrong.
async function ask() {
  if (at("ask").getAttribute("aria-disabled") === "true") return;
  at("problem").hidden = true;
  forgetConditionProblem();
  stopPlaying();
  at("ask").setAttribute("aria-disabled", "true");
  at("ask").textContent = "Searching…";
  at("answer").setAttribute("aria-busy", "true");
  say("Searching");
  try {
    useKey(at("key").value);
    const asked = await question();
    show(await recommend(asked, explains), asked);
  } catch (problem) {
    at("answer").hidden = true;
    say("");
    showProblem(problem);
  } finally {
    at("ask").setAttribute("aria-disabled", "false");
    at("ask").textContent = "Recommend";
    at("answer").removeAttribute("aria-busy");
  }
}

// The answer ------------------------------------------------------------------------------------

function show(answer, asked) {
  const explanation = answer.explanation;
  at("answer").hidden = false;
  at("answer").classList.toggle("explained", Boolean(explanation));
  showRemark(answer, asked);
  showBest(answer, explanation);
  redraw = () => {};
  if (explanation) {
    showMethods(explanation);
    showInside(explanation, answer.method);
  }
  const found = answer.items.length === 1 ? "1 item" : `${answer.items.length} items`;
  say(answer.items.length ? `${found} found. The best: ${itemName(answer.items[0])}.` : "No items found.");
}

function showRemark(answer, asked) {
  const missing = answer.unknown.length ? `Not in the catalogue: ${answer.unknown.join(", ")}. ` : "";
  let [title, words] = [missing, "The rest was used."];
  if (answer.by_popularity) {
    const why = missing ? "That is the whole history" : asked.user !== undefined
      ? "This service has no events of such a user" : "The history is empty";
    title = missing || (asked.user !== undefined ? `Nothing is known of ${asked.user}. ` : "Nothing to go by. ");
    words = `${why}, so these are the most popular items. Nothing was searched.`;
  }
  at("remark").replaceChildren(element("p", "", element("b", "", title), words));
  at("remark").hidden = !title;
}

function showBest(answer, explanation) {
  const stages = Object.entries(answer.milliseconds)
    .map(([stage, time]) => `${stage} ${duration(1e6 * time)}`).join(", ");
  const exact = answer.exact ? "exactly what scoring every item would return" : "not proven to be exact";
  at("best-words").replaceChildren(
    answer.method ? `Found by ${answer.method}: ${exact}. ` : "", `Time: ${stages}.`);
  const range = explanation ? contributionRange(explanation.top) : null;
  const rows = answer.items.map((item, place) => {
    const name = element("th", "", itemName(item), " ");
    name.scope = "row";
    if (item.name) name.append(element("small", "id", String(item.item)));
    const row = element("tr", "", element("td", "number", String(place + 1)), name,
      element("td", "number", answer.by_popularity ? count(item.score) : score(item.score)));
    if (range) row.append(element("td", "wide", contributionBar(explanation.top[place], range)));
    return row;
  });
  at("best").tBodies[0].replaceChildren(...rows);
  if (!explanation) return;
  const splits = [...Array(explanation.num_splits).keys()];
  at("splits").replaceChildren(...splits.map((split) => {
    const swatch = element("span", "swatch");
    swatch.style.background = splitColour(split, splits.length);
    return element("li", "", swatch, `split ${split}`);
  }));
  const added = Object.keys(ADDED).filter((part) => explanation.top.some((item) => item[part] !== null));
  at("splits").append(...added.map((part) => {
    const swatch = element("span", "swatch");
    swatch.style.background = ADDED[part];
    return element("li", "", swatch, part);
  }));
  fillTable(at("contributions"),
    ["Item", ...splits.map((split) => `split ${split}`), ...added, "score"],
    explanation.top.map((item, place) => [itemName(answer.items[place]),
      ...item.contributions.map(score), ...added.map((part) => score(item[part])), score(item.score)]));
}

function showMethods({ methods, num_items: numItems }) {
  const ran = methods.filter((run) => run.unavailable === null);
  const slowest = Math.max(...ran.map((run) => run.nanoseconds));
  const same = ran.filter((run) => run.identical).length;
  at("methods-words").replaceChildren(element("b", "", same === ran.length
    ? `All ${ran.length} methods return the same items with the same score bits. `
    : `${ran.length - same} of ${ran.length} methods disagree. `),
    "Times are medians of five runs on one thread. recjpqprune meets an item in several splits, and scores it each time.");
  at("methods").tBodies[0].replaceChildren(...methods.map((run) => {
    const other = run.ran && run.ran !== run.method;
    const note = !other ? METHODS[run.method]
      : run.method === "auto" ? `chose ${run.ran} for this query` : `${run.ran} ran in its place`;
    const name = element("th", "", element("span", "method-name", run.method), element("span", "method-note", note));
    name.scope = "row";
    if (run.unavailable !== null) {
      const why = element("td", "", `not here: ${run.unavailable}`);
      why.colSpan = 5;
      return element("tr", "missing", name, why);
    }
    const bar = element("div", "bar");
    bar.style.width = `${(100 * run.nanoseconds) / slowest}%`;
    const verdict = run.identical ? element("span", "same", "✓ identical") : element("span", "different", "✗ different");
    return element("tr", "", name, element("td", "number", duration(run.nanoseconds)),
      element("td", "bar-column", bar), element("td", "number", count(run.items_scored)),
      element("td", "number", share(run.items_scored, numItems)), element("td", "", verdict));
  }));
}

// Inside the search -----------------------------------------------------------------------------

function showInside(explanation, answeredBy) {
  const { trace } = explanation;
  const last = trace.points.length - 1;
  const readout = (words) => { at("heat-readout").textContent = words; };
  const map = heatMap(at("heat"), explanation, readout);
  at("heat-scale").replaceChildren(...map.quartiles.map((value) => element("span", "", score(value))));
  const colours = " Colours go by a score’s rank among all of these scores, not by its size.";
  at("heat-words").textContent = (explanation.num_splits === 1
    ? "There is one split only, and an item’s score is that of its sub-item id. Here are all of them, the best first."
    : `An item is ${count(explanation.num_splits)} sub-item ids, one for each split, and its score is the sum of theirs. ` +
      "Each row holds a split’s sub-item ids, the best first. Good items are made of good sub-item ids.") + colours;

  const ways = explanation.methods.filter((run) => run.visited);
  at("visited-by").replaceChildren(...ways.map((run) => new Option(run.method, run.method)));
  at("visited-by").value = ways.some((run) => run.method === answeredBy) ? answeredBy : trace.method;
  at("step").max = String(last);
  at("step").value = String(last);

  // The traced method is shown after the chosen step, any other one at its end.
  const visitedNow = () => {
    const chosen = at("visited-by").value;
    return chosen === trace.method ? trace.points[Number(at("step").value)].visited
      : ways.find((run) => run.method === chosen)?.visited;
  };
  const update = () => {
    const now = Number(at("step").value);
    const point = trace.points[now];
    map.visit(visitedNow());
    at("visit-words").textContent = visitWords(explanation, at("visited-by").value, visitedNow());
    showHeatTable(explanation, visitedNow());
    traceChart(at("trace"), trace, now);
    at("step-now").textContent = count(point.step);
    at("step").setAttribute("aria-valuetext", `step ${point.step}`);
    at("step-words").textContent = stepWords(explanation, point);
  };
  at("step").oninput = () => { stopPlaying(); at("visited-by").value = trace.method; update(); };
  at("visited-by").onchange = update;
  at("play").onclick = () => play(last, () => { at("visited-by").value = trace.method; update(); });
  at("trace-words").textContent = stopWords(explanation);
  fillTable(at("trace-table"), ["step", "threshold", "upper bound", "items scored"],
    trace.points.map((point) => [count(point.step), score(point.threshold),
      score(point.upper_bound), count(point.items_scored)]));
  redraw = () => { map.colour(); traceChart(at("trace"), trace, Number(at("step").value)); };
  update();
}

function visitWords({ methods, num_splits: numSplits, num_sub_items: numSubItems }, method, visited) {
  const number = visited.reduce((sum, count) => sum + count, 0);
  const words = `${method} visited ${count(number)} of ${count(numSplits * numSubItems)} sub-item ids`;
  const { ran, steps } = methods.find((run) => run.method === method);
  if (ran !== "cells") return `${words}.`;
  const cells = (numSplits / 2) * numSubItems ** 2;
  return `${words}, but only in ${count(steps)} lists and cells; two by two they make ${count(cells)} cells.`;
}

function showHeatTable(explanation, visited) {
  const items = marked(explanation);
  fillTable(at("heat-table"),
    ["Split", "best score", "worst score", "visited", ...items.map(([mark, item]) =>
      `rank in the ${MARKS[mark]} item (${itemName(item)})`)],
    explanation.heat_map.scores.map((row, split) => [`split ${split}`, score(row[0]), score(row[row.length - 1]),
      `${count(visited?.[split] ?? 0)} of ${count(explanation.num_sub_items)}`,
      ...items.map(([, item]) => count(item.sub_item_ranks[split] + 1))]));
}

function stepWords(explanation, point) {
  const scored = `After step ${count(point.step)}: ${count(point.items_scored)} items scored`;
  if (point.threshold === null) return `${scored}, fewer than asked for are known.`;
  if (point.upper_bound === null) return `${scored}, and none is left.`;
  const gap = point.upper_bound - point.threshold;
  return gap >= 0 ? `${scored}. An unseen item could still be better by ${score(gap)}.`
    : `${scored}. No unseen item can be better.`;
}

function stopWords({ trace, num_items: numItems, num_splits: numSplits, num_sub_items: numSubItems }) {
  const end = trace.points[trace.points.length - 1];
  const why = trace.stop === "lists_used_up"
    ? "because every sub-item id of one split had been visited, and with them every item"
    : `because no unseen item could score more than ${score(end.upper_bound)}, and the last of the ` +
      `best had ${score(end.threshold)} already`;
  const unseen = numItems - trace.items_seen;
  const steps = trace.steps === 1 ? "1 step" : `${count(trace.steps)} steps`;
  return `${trace.method}, one sub-item id a step, stopped after ${steps}, ${why}. It visited ` +
    `${count(trace.sub_items_visited)} of ${count(numSplits * numSubItems)} sub-item ids; ` +
    `${count(unseen)} of ${count(numItems)} items (${share(unseen, numItems)}) it never looked at.`;
}

function play(last, update) {
  stopPlaying();
  let now = 0;
  const timer = setInterval(() => {
    at("step").value = String(now);
    update();
    now += 1;
    if (now > last) stopPlaying();
  }, Math.min(300, 2500 / (last + 1)));
  at("play").textContent = "Stop";
  const start = at("play").onclick;
  at("play").onclick = () => stopPlaying();
  stopPlaying = () => {
    clearInterval(timer);
    at("play").textContent = "Play";
    at("play").onclick = start;
    stopPlaying = () => {};
  };
}

// Which columns conditions and limits may name.
function showAttributes(columns) {
  at("by-attributes").hidden = !columns.length;
  at("columns").textContent = `There are ${columns.map(([name, kind]) => `${name} (${kind})`).join(", ")}.`;
  const single = columns.filter(([, kind]) => !kind.startsWith("list")).map(([name]) => name);
  at("at-most-column").replaceChildren(...single.map((name) => new Option(name, name)));
}

// Begin -----------------------------------------------------------------------------------------

at("question").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
for (const choice of document.querySelectorAll("input[name=asker]"))
  choice.addEventListener("change", () => {
    at("by-items").hidden = asker() !== "items";
    at("by-user").hidden = asker() !== "user";
  });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
new ResizeObserver(() => redraw()).observe(at("trace"));
readiness().then(
  ({ items, kind, live, repeats, attributes }) => {
    const by = kind === "vector index" ? " by their codes" : "";
    at("catalogue").textContent = `${count(items)} items, searched exactly${by}.`;
    explains = !live;
    showAttributes(Object.entries(attributes));
    if (repeats) at("exclude-seen").checked = false;  // what it is good at would be left out
    if (kind !== "recommender")
      showProblem(new Problem("An index without an encoder",
        "It answers sequence embeddings at /search, but cannot recommend to a history."));
  },
  showProblem,
);
