// Conversations in IndexedDB, shared by all tabs of this browser.
//
// A chat record says what a conversation is; each message is a record of its own, so that a tab
// writing an answer never overwrites what another tab wrote. Changes of a chat's structure name the
// revision they were made for. Where nothing can be stored, memory serves until the page is closed.
// Knows no DOM and no server.

const DATABASE = "specserve", VERSION = 1;
const SAME_MS = 1000;  // for the page before to let go of its tab's name
const ANSWER_MS = 60;  // for other tabs to answer, where there are no locks
export const LEASE_MS = 5000;  // a writer that says nothing for so long is gone

export class Stale extends Error {}

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

const ended = (transaction) => new Promise((resolve, reject) => {
  transaction.oncomplete = () => resolve();
  transaction.onabort = () => reject(transaction.error || new Error("storing was broken off"));
  transaction.onerror = () => reject(transaction.error);
});

function openDatabase() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, VERSION);
    request.onupgradeneeded = () => {
      const database = request.result;
      database.createObjectStore("chats", { keyPath: "id" });
      database.createObjectStore("messages", { keyPath: ["chat", "at"] });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("another tab holds an older version"));
  });
}

export const randomId = (bytes = 10) =>
  Array.from(crypto.getRandomValues(new Uint8Array(bytes)), (b) => b.toString(16).padStart(2, "0")).join("");

export class Store {
  // onchange({chat, what}): told of other tabs' changes. ontrouble(error): storing failed.
  constructor({ onchange, ontrouble }) {
    this.onchange = onchange;
    this.ontrouble = ontrouble;
    this.tab = randomId(6);
    this.self = randomId(6);  // of this page load
    this.taken = false;
    this.database = null;
    this.memory = { chats: new Map(), messages: new Map() };  // used while database is null
    try {
      this.channel = new BroadcastChannel("specserve");
      this.channel.onmessage = ({ data }) => {
        if (data.who === undefined) this.onchange(data);
        else if (data.who === this.tab && data.taken === undefined) this.channel.postMessage({ who: this.tab, taken: data.self });
        else if (data.taken === this.self) this.taken = true;
      };
    } catch { this.channel = null; }
    try {
      // The same over a reload, so that a tab finds the answers it was writing.
      this.tab = sessionStorage.getItem("specserve.tab") || this.tab;
      sessionStorage.setItem("specserve.tab", this.tab);
    } catch { /* a tab without storage has no past */ }
  }

  // A duplicated tab starts with a copy of the other's storage, its name included. Who has a name
  // holds a lock of it; browsers have none for pages over plain HTTP, there the others are asked.
  async ownName() {
    if (navigator.locks ? await this.holds() : !(await this.isTaken())) return;
    this.tab = randomId(6);
    try { sessionStorage.setItem("specserve.tab", this.tab); } catch { /* no storage */ }
    if (navigator.locks) await this.holds();
  }

  // Takes the name's lock until the page is left; false if somebody has it.
  holds() {
    return new Promise((resolve) => {
      navigator.locks.request(`specserve.${this.tab}`, { signal: AbortSignal.timeout(SAME_MS) }, () => {
        resolve(true);
        return new Promise(() => {});
      }).catch(() => resolve(false));
    });
  }

  async isTaken() {
    if (!this.channel) return false;
    this.channel.postMessage({ who: this.tab, self: this.self });
    await new Promise((resolve) => setTimeout(resolve, ANSWER_MS));
    return this.taken;
  }

  async open() {
    await this.ownName();
    try {
      this.database = await openDatabase();
      this.database.onversionchange = () => { this.database.close(); this.database = null; };
    } catch (error) { this.ontrouble(error, true); }
  }

  tell(chat, what) { this.channel?.postMessage({ chat, what }); }

  // All chat records, the latest first; without their messages.
  async chats() {
    const all = this.database
      ? await done(this.database.transaction("chats").objectStore("chats").getAll())
      : [...this.memory.chats.values()].map((chat) => structuredClone(chat));
    return all.sort((a, b) => b.updated - a.updated);
  }

  async chat(id) {
    if (!this.database) return structuredClone(this.memory.chats.get(id)) ?? null;
    return (await done(this.database.transaction("chats").objectStore("chats").get(id))) ?? null;
  }

  async messages(id) {
    if (!this.database) return structuredClone(this.memory.messages.get(id) ?? []);
    const range = IDBKeyRange.bound([id, 0], [id, Infinity]);
    return done(this.database.transaction("messages").objectStore("messages").getAll(range));
  }

  // Changes a chat in one transaction. change(chat): alters the record, or throws to leave all as
  // it was; rev: the revision the caller saw, null = any; keep: how many messages stay (undefined =
  // all); add: messages written after or over them. Returns the new record.
  async change(id, { rev = null, change = () => {}, keep, add = [] } = {}, what = "changed") {
    const alter = (held) => {
      const chat = held ?? { id, title: "", created: Date.now(), system: "", rev: 0, writer: null };
      if (rev !== null && chat.rev !== rev) throw new Stale("the conversation changed in another tab");
      change(chat);
      chat.rev += 1;
      chat.updated = Date.now();
      return chat;
    };
    const chat = this.database ? await this.changeStored(id, alter, keep, add) : this.changeHeld(id, alter, keep, add);
    this.tell(id, what);
    return chat;
  }

  async changeStored(id, alter, keep, add) {
    const transaction = this.database.transaction(["chats", "messages"], "readwrite");
    const chats = transaction.objectStore("chats"), messages = transaction.objectStore("messages");
    const finished = ended(transaction);
    let chat;
    try {
      chat = alter(await done(chats.get(id)));
      chats.put(chat);
      if (keep !== undefined) messages.delete(IDBKeyRange.bound([id, keep], [id, Infinity]));
      for (const message of add) messages.put({ ...message, chat: id });
    } catch (error) {
      try { transaction.abort(); } catch { /* over already */ }
      finished.catch(() => {});
      throw error;
    }
    await finished;
    return chat;
  }

  changeHeld(id, alter, keep, add) {
    const chat = alter(structuredClone(this.memory.chats.get(id)));
    const list = (this.memory.messages.get(id) ?? []).filter((m) => keep === undefined || m.at < keep);
    for (const message of add) list[message.at] = structuredClone({ ...message, chat: id });
    this.memory.chats.set(id, chat);
    this.memory.messages.set(id, list);
    return structuredClone(chat);
  }

  // Writes one message that exists, and renews this tab's lease on the chat: "kept". Or "taken" if
  // another tab writes there now or has written its end, "gone" if the message or the chat is.
  async progress(id, message, what = "progress") {
    const judged = (chat, held) =>
      !chat || held?.id !== message.id ? "gone" : !held.live || (chat.writer && chat.writer.tab !== this.tab) ? "taken" : "kept";
    const lease = message.live ? { tab: this.tab, until: Date.now() + LEASE_MS } : null;
    if (!this.database) {
      const chat = this.memory.chats.get(id), list = this.memory.messages.get(id);
      const said = judged(chat, list?.[message.at]);
      if (said !== "kept") return said;
      chat.writer = lease;
      list[message.at] = structuredClone({ ...message, chat: id });
      return said;
    }
    const transaction = this.database.transaction(["chats", "messages"], "readwrite");
    const finished = ended(transaction);
    finished.catch(() => {});
    const chats = transaction.objectStore("chats"), messages = transaction.objectStore("messages");
    const [chat, held] = await Promise.all([done(chats.get(id)), done(messages.get([id, message.at]))]);
    const said = judged(chat, held);
    if (said !== "kept") return said;
    chat.writer = lease;
    chats.put(chat);
    messages.put({ ...message, chat: id });
    await finished;
    this.tell(id, what);
    return said;
  }

  async remove(id) {
    if (this.database) {
      const transaction = this.database.transaction(["chats", "messages"], "readwrite");
      transaction.objectStore("chats").delete(id);
      transaction.objectStore("messages").delete(IDBKeyRange.bound([id, 0], [id, Infinity]));
      await ended(transaction);
    } else {
      this.memory.chats.delete(id);
      this.memory.messages.delete(id);
    }
    this.tell(id, "removed");
  }

  // Whether another tab that is alive writes an answer in this chat.
  writtenElsewhere(chat) {
    return Boolean(chat?.writer && chat.writer.tab !== this.tab && chat.writer.until > Date.now());
  }
}
