// Numbers and elements as people read them.

const whole = new Intl.NumberFormat("en");
const precise = new Intl.NumberFormat("en", {
  minimumFractionDigits: 3, maximumFractionDigits: 3, signDisplay: "negative", // no −0.000
});

export const count = (number) => whole.format(number);
export const score = (number) => (number === null ? "–" : precise.format(number).replace("-", "−"));

export function share(part, all) {
  const percent = all ? (100 * part) / all : 0;
  const digits = percent > 0 && percent < 0.1 ? 3 : percent > 0 && percent < 10 ? 1 : 0;
  return `${percent.toFixed(digits)} %`;
}

export function duration(nanoseconds) {
  const [value, unit] = nanoseconds < 1e6 ? [nanoseconds / 1e3, "µs"] : [nanoseconds / 1e6, "ms"];
  return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ${unit}`;
}

export const itemName = (item) => item.name ?? `item ${item.item ?? item.item_id}`;

// An element with classes and children; text is always text, never markup.
export function element(tag, classes = "", ...children) {
  const made = document.createElement(tag);
  if (classes) made.className = classes;
  made.append(...children);
  return made;
}

// Replaces a table by one with these headings and rows; the first cell of a row names it.
export function fillTable(table, headings, rows) {
  const head = element("tr");
  headings.forEach((heading, column) => {
    const cell = element("th", column ? "number" : "", heading);
    cell.scope = "col";
    head.append(cell);
  });
  const body = element("tbody");
  for (const [name, ...values] of rows) {
    const first = element("th", "", name);
    first.scope = "row";
    body.append(element("tr", "", first, ...values.map((value) => element("td", "number", value))));
  }
  table.replaceChildren(element("thead", "", head), body);
}
