// The list of conversations: which there are, which one is open, renaming and deleting.
//
// Shows chat records and reports clicks. Knows neither the store nor messages.

import { icon } from "./messages.js";

const list = document.getElementById("chats");

function small(name, text, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = "icon";
  made.title = text;
  made.append(icon(name));
  made.addEventListener("click", act);
  return made;
}

// chats: records, the latest first; open: the id shown; busy(id): whether an answer is written.
export function showChats(chats, open, busy, { pick, rename, remove }) {
  const focused = document.activeElement?.closest?.("#chats li")?.dataset.id;
  list.replaceChildren(...chats.map((chat) => {
    const item = document.createElement("li"), name = document.createElement("button"), text = document.createElement("span");
    const title = chat.title || "New conversation";
    item.dataset.id = chat.id;
    item.classList.toggle("busy", busy(chat.id));
    name.type = "button";
    name.className = "chat-name";
    text.textContent = title;
    name.title = title;
    name.append(text);
    if (chat.id === open) name.setAttribute("aria-current", "true");
    name.addEventListener("click", () => pick(chat.id));
    const edit = small("edit", "Rename", () => rename(chat)), bin = small("bin", "Delete", () => remove(chat));
    edit.setAttribute("aria-label", `Rename ${title}`);
    bin.setAttribute("aria-label", `Delete ${title}`);
    item.append(name, edit, bin);
    return item;
  }));
  if (focused) list.querySelector(`li[data-id="${focused}"] .chat-name`)?.focus();
}
