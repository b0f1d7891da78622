// A box that finds items while one types, and the list of those that were picked. It follows the
// combobox pattern: the input keeps the focus, arrow keys move through the suggestions.

import { element, itemName } from "./words.js";

const PAUSE = 120; // milliseconds after the last key

// `find(text, signal)` returns suggestions, `look(id)` an item or null; `say` tells people.
export function itemPicker({ input, list, chosen, find, look, say }) {
  const picked = [];
  let suggested = [];
  let active = -1;
  let timer = 0;
  let asking = new AbortController();

  function show() {
    list.replaceChildren(...suggested.map((item, place) => {
      const option = element("li", "", element("span", "", itemName(item)));
      if (item.name) option.append(element("small", "", String(item.item)));
      option.id = `suggestion-${place}`;
      option.setAttribute("role", "option");
      option.setAttribute("aria-selected", String(place === active));
      // Before the input loses the focus.
      option.addEventListener("pointerdown", (event) => { event.preventDefault(); pick(item); });
      return option;
    }));
    const open = suggested.length > 0;
    list.hidden = !open;
    input.setAttribute("aria-expanded", String(open));
    if (active >= 0) {
      input.setAttribute("aria-activedescendant", `suggestion-${active}`);
      list.children[active].scrollIntoView({ block: "nearest" });
    } else input.removeAttribute("aria-activedescendant");
  }

  function close() {
    clearTimeout(timer);
    asking.abort();
    suggested = [];
    active = -1;
    show();
  }

  function showPicked() {
    chosen.replaceChildren(...picked.map((item, place) => {
      const remove = element("button", "", "×");
      remove.type = "button";
      remove.setAttribute("aria-label", `Remove ${itemName(item)}`);
      remove.addEventListener("click", () => { removeAt(place); input.focus(); });
      const name = element("span", "", itemName(item));
      name.title = `${itemName(item)} (${item.item})`;
      return element("li", "", name, remove);
    }));
    input.placeholder = picked.length ? "" : "Type a name or an id";
  }

  function removeAt(place) {
    const [item] = picked.splice(place, 1);
    showPicked();
    say(`${itemName(item)} removed`);
  }

  function pick(item) {
    picked.push(item);
    input.value = "";
    close();
    showPicked();
    say(`${itemName(item)} added`);
  }

  async function suggest() {
    asking.abort();
    asking = new AbortController();
    const { signal } = asking;
    const found = await find(input.value.trim(), signal);
    if (signal.aborted) return;
    suggested = found;
    active = -1;
    show();
    const many = found.length === 1 ? "1 suggestion" : `${found.length} suggestions`;
    say(found.length ? many : "Nothing has that name");
  }

  // Ids that were typed out, with commas between them.
  async function pickTyped() {
    const typed = input.value.split(",").map((part) => part.trim()).filter(Boolean);
    close();
    const missing = [];
    for (const id of typed) {
      const item = await look(id);
      if (item) pick(item);
      else missing.push(id);
    }
    input.value = missing.join(", ");
    return missing;
  }

  input.addEventListener("input", () => {
    clearTimeout(timer);
    if (!input.value.trim() || input.value.includes(",")) close();
    else timer = setTimeout(() => suggest().catch(() => close()), PAUSE);
  });
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    const last = suggested.length - 1;
    if (event.key === "ArrowDown" && last >= 0) active = active < last ? active + 1 : 0;
    else if (event.key === "ArrowUp" && last >= 0) active = active > 0 ? active - 1 : last;
    else if (event.key === "Escape" && last >= 0) return close();
    else if (event.key === "Enter" && active >= 0) {
      event.preventDefault();
      return pick(suggested[active]);
    } else if (event.key === "Backspace" && !input.value && picked.length)
      return removeAt(picked.length - 1);
    else return undefined;
    event.preventDefault();
    return show();
  });
  return { picked, pickTyped };
}
