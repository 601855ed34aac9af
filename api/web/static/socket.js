// The WebSocket to the server: connects, presents the key, comes back after drops and takes over
// what was running. Hands messages of a generation to whoever started it, in order, each once.
// Knows the protocol's frames; nothing of conversations or of the page.

const PROTOCOL = "specserve.v1.json", KEY = "specserve.key.";
const FIRST_MS = 400, LONGEST_MS = 12000, HELLO_MS = 8000, QUIET_MS = 20000, PONG_MS = 8000, RELOAD = 4000;

const base64url = (text) =>
  btoa(String.fromCharCode(...new TextEncoder().encode(text))).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");

// States: connecting, open, waiting (tries again; "refused": the server answers, but not this page's
// socket), draining, key (one is needed).
export class Link {
  // url: ws://…/v1/stream. key(): the key or "". onstate(state, detail), onhello(message),
  // onerror(message): an error that belongs to no generation.
  constructor({ url, key, onstate, onhello, onerror }) {
    Object.assign(this, { url, key, onstate, onhello, onerror });
    this.state = "connecting";
    this.socket = null;
    this.hello = null;
    this.tries = 0;
    this.timer = this.watch = 0;
    this.live = new Map();  // gen -> {request, seq, token, session, sent, take, lost}
    addEventListener("online", () => this.now());
    // Ended by its own code, or the browser would say "going away" and with it that nobody returns.
    addEventListener("pagehide", () => { if (this.live.size) this.socket?.close(RELOAD); });
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.now(); });
  }

  // Starts a generation. take(message): each of its messages. lost(why): it can't be continued.
  generate(gen, request, take, lost) {
    this.live.set(gen, { request, seq: -1, token: "", session: "", sent: false, take, lost });
    if (this.hello) this.start(gen);
    else this.now();
  }

  // Takes over a generation another page load began.
  adopt(gen, { seq, token }, take, lost) {
    this.live.set(gen, { request: null, seq, token, session: "", sent: true, take, lost });
    if (this.hello) this.resume();
    else this.now();
  }

  cancel(gen) {
    const entry = this.live.get(gen);
    if (!entry) return;
    if (this.hello && entry.session === this.hello.session) return this.say({ type: "cancel", gen });
    // Without a connection it is over here at once, and there as soon as the server can be told.
    const { lost } = entry;
    if (entry.sent && entry.token) Object.assign(entry, { take() {}, lost() {}, unwanted: true });
    else this.live.delete(gen);
    lost("cancelled");
  }

  // Takes no more part in a generation, which goes on elsewhere: the socket it came on is dropped, so
  // that it can be taken over; what else ran on it is resumed on the next one.
  release(gen) {
    this.live.delete(gen);
    this.socket?.close(RELOAD);
  }

  // Messages up to seq are kept here and need not be kept there.
  ack(gen, seq) { if (this.hello && seq >= 0) this.say({ type: "ack", gen, seq }); }

  token(gen) { return this.live.get(gen)?.token ?? ""; }

  start(gen) {
    const entry = this.live.get(gen);
    entry.sent = true;
    this.belongs(entry);
    this.say({ type: "generate", gen, resumable: true, ...entry.request });
  }

  belongs(entry) {
    entry.session = this.hello.session;
    entry.token = this.hello.resume_token ?? "";
  }

  say(message) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  // Connects at once instead of waiting for its turn.
  now() {
    if (this.state !== "waiting") return;
    clearTimeout(this.timer);
    this.connect();
  }

  become(state, detail = "") { this.state = state; this.onstate(state, detail); }

  connect() {
    clearTimeout(this.timer);
    this.become("connecting");
    const key = this.key();
    const socket = new WebSocket(this.url, key ? [PROTOCOL, KEY + base64url(key)] : [PROTOCOL]);
    this.socket = socket;
    const mine = (act) => (event) => { if (this.socket === socket) act(event); };
    socket.onmessage = mine((event) => this.take(JSON.parse(event.data)));
    socket.onclose = mine((event) => this.closed(event.code));
    this.watch = setTimeout(mine(() => this.drop()), HELLO_MS);
    // A server that wants a key lets the socket wait for it; this page asks its reader right away.
    if (!key) this.ask().then((trouble) => {
      if (trouble !== "key" || this.socket !== socket || this.hello) return;
      clearTimeout(this.watch);
      this.socket = null;
      socket.close();
      this.become("key");
    });
  }

  // Gives a socket up that no longer answers; its close event may take minutes.
  drop() {
    const socket = this.socket;
    this.socket = null;
    socket?.close();
    this.closed(1006);
  }

  quiet() {
    clearTimeout(this.watch);
    this.watch = setTimeout(() => {
      this.say({ type: "ping", t: 0 });
      this.watch = setTimeout(() => this.drop(), PONG_MS);
    }, QUIET_MS);
  }

  async closed(code) {
    clearTimeout(this.watch);
    const knew = this.hello !== null;
    let detail = "";
    this.hello = this.socket = null;
    if (code === 3000) return this.become("key", this.key() ? "wrong" : "");
    this.become("connecting", "lost");
    if (!knew) {
      // A refused handshake says nothing to a page; an ordinary request does.
      const trouble = await this.ask();
      if (this.socket !== null || this.state === "key") return;
      if (trouble === "key") return this.become("key", this.key() ? "wrong" : "");
      if (trouble === "fine" && this.tries >= 2) detail = "refused";
    }
    const wait = Math.min(LONGEST_MS, FIRST_MS * 2 ** this.tries) * (0.75 + Math.random() / 2);
    this.tries += 1;
    this.become("waiting", detail);
    this.timer = setTimeout(() => this.connect(), wait);
  }

  // "key" if one is needed, "fine" if an ordinary request is answered, else "".
  async ask() {
    const key = this.key();
    try {
      const address = new URL("../version", this.url.replace(/^ws/, "http"));
      const said = await fetch(address, { headers: key ? { authorization: `Bearer ${key}` } : {}, cache: "no-store" });
      return said.status === 401 || said.status === 403 ? "key" : said.ok ? "fine" : "";
    } catch { return ""; }
  }

  take(message) {
    this.quiet();
    if (message.type === "hello") {
      this.hello = message;
      this.tries = 0;
      this.become("open");
      this.onhello(message);
      this.resume();
    } else if (message.type === "draining") {
      this.become("draining");
    } else if (message.type === "resumed") {
      for (const gen of message.gens) {
        const entry = this.live.get(gen);
        if (!entry) continue;
        this.belongs(entry);
        entry.asked = false;
        if (entry.unwanted) this.say({ type: "cancel", gen });
      }
      this.forget(message.gens);
    } else if (message.type === "error" && message.code === "unauthorized" && !message.gen) {
      this.become("key", "wrong");
    } else if (message.gen) {
      this.deliver(message);
    } else if (message.type === "error") {
      this.onerror(message);
    }
  }

  deliver(message) {
    const gen = message.gen, entry = this.live.get(gen);
    if (!entry) return;
    if (message.type === "error" && message.code === "resume_gap") return this.gap(gen, entry);
    if (message.seq !== null && message.seq !== undefined) {
      if (message.seq <= entry.seq) return;  // seen before the drop
      entry.seq = message.seq;
    }
    if (message.type === "error" || (message.type === "finished" && message.last !== false)) this.live.delete(gen);
    entry.take(message);
  }

  resume() {
    const byToken = new Map();
    for (const [gen, entry] of this.live) {
      if (!entry.sent) this.start(gen);
      else if (entry.session !== this.hello.session) {
        if (!entry.token) this.gap(gen, entry);
        else byToken.set(entry.token, { ...byToken.get(entry.token), [gen]: entry.seq });
      }
    }
    for (const [token, gens] of byToken) {
      for (const gen of Object.keys(gens)) this.live.get(gen).asked = true;
      this.say({ type: "resume", resume_token: token, gens });
    }
  }

  // What was asked for and is not among those resumed is lost, if nobody says so within a moment.
  forget(resumed) {
    const left = [...this.live].filter(([gen, entry]) => entry.asked && !resumed.includes(gen));
    if (left.length) setTimeout(() => {
      for (const [gen, entry] of left) if (this.live.get(gen) === entry && entry.asked) this.gap(gen, entry);
    }, 1000);
  }

  gap(gen, entry) {
    entry.asked = false;
    if (entry.seq < 0 && entry.request && this.hello) return this.start(gen);  // it never began
    this.live.delete(gen);
    entry.lost("gap");
  }
}
