// The KV blocks of one core as a grid. Where there are more blocks than room, a cell stands for several, and is filled
// in proportion: owned from below, then shared, then cached; what is left is free.

const FREE = 0, CACHED = 1, FIRST_OWNERS = 2; // as in jaxpaged/core/snapshot.py
const LARGEST = 20, SMALLEST = 7; // pixels of a cell and the gap beside it
const MAX_HEIGHT = 320;
const MAX_NAMES = 4;

export class BlockMap {
  #codes = new Uint8Array();
  #owners = [];
  #requests = [];
  #colours = null;
  #grid = { columns: 1, rows: 1, pitch: LARGEST, per: 1 };
  #at = null; // the cell that is pointed at
  #highlit = null; // the key of a request whose blocks stand out

  constructor(canvas, readout) {
    this.canvas = canvas;
    this.readout = readout;
    this.pen = canvas.getContext("2d");
    canvas.addEventListener("pointermove", (event) => this.#point(this.#cellOf(event)));
    canvas.addEventListener("pointerdown", (event) => this.#point(this.#cellOf(event)));
    canvas.addEventListener("pointerleave", () => this.#point(null));
    canvas.addEventListener("focus", () => canvas.matches(":focus-visible") && this.#point(this.#at ?? 0));
    canvas.addEventListener("blur", () => this.#point(null));
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
    this.#read();
  }

  // Shows a core's snapshot. `requests` has {key, name, colour} of each of its requests, in their order.
  show({ num_blocks: blocks, owners, blocks: packed }, requests, colours) {
    this.#codes = unpack(packed, blocks);
    this.#owners = owners;
    this.#requests = requests;
    this.#colours = colours;
    this.#layOut();
    this.#draw();
    this.#read();
    this.canvas.setAttribute("aria-label", `Map of the KV blocks. ${this.#summary()}`);
    this.canvas.dataset.owned = this.#count((code) => code >= FIRST_OWNERS);
    this.canvas.dataset.shared = this.#count((code) => this.#isShared(code));
    this.canvas.dataset.cached = this.#count((code) => code === CACHED);
  }

  highlight(key) {
    this.#highlit = key;
    if (this.#colours) this.#draw();
  }

  #layOut() {
    const width = this.canvas.parentElement.clientWidth - 2 * parseFloat(getComputedStyle(this.canvas.parentElement).paddingLeft);
    const blocks = this.#codes.length;
    let pitch = LARGEST;
    const fits = (size) => Math.floor(width / size) * Math.floor(MAX_HEIGHT / size) >= blocks;
    while (pitch > SMALLEST && !fits(pitch)) pitch--;
    const columns = Math.max(1, Math.floor(width / pitch));
    pitch = Math.max(1, width / columns); // to the edge
    const per = Math.max(1, Math.ceil(blocks / (columns * Math.floor(MAX_HEIGHT / pitch))));
    const rows = Math.max(1, Math.ceil(Math.ceil(blocks / per) / columns));
    this.#grid = { columns, rows, pitch, per };
    const scale = devicePixelRatio || 1;
    const [wide, high] = [columns * pitch, Math.ceil(rows * pitch)];
    if (this.canvas.width !== Math.round(wide * scale) || this.canvas.height !== Math.round(high * scale)) {
      this.canvas.width = Math.round(wide * scale);
      this.canvas.height = Math.round(high * scale);
      this.canvas.style.width = `${wide}px`;
      this.canvas.style.height = `${high}px`;
    }
    this.pen.setTransform(scale, 0, 0, scale, 0, 0);
  }

  #draw() {
    const { pen, canvas } = this;
    const { columns, pitch } = this.#grid;
    const size = Math.floor(pitch) - (pitch > 10 ? 2 : 1);
    const place = (cell) => [Math.round((cell % columns) * pitch), Math.round(Math.floor(cell / columns) * pitch)];
    pen.clearRect(0, 0, canvas.width, canvas.height);
    for (let cell = 0; cell < this.#numCells; cell++) this.#drawCell(cell, ...place(cell), size);
    if (this.#at !== null && this.#at < this.#numCells) {
      const [x, y] = place(this.#at);
      pen.strokeStyle = this.#colours.shared;
      pen.lineWidth = 2;
      pen.strokeRect(Math.max(1, x - 1), Math.max(1, y - 1), size + 2, size + 2);
    }
  }

  #drawCell(cell, x, y, size) {
    const { pen } = this;
    const colours = this.#colours;
    const { first, owned, shared, cached, owner, count } = this.#tally(cell);
    pen.globalAlpha = 1;
    pen.fillStyle = colours.free;
    pen.fillRect(x, y, size, size);
    let bottom = y + size;
    const fill = (part, colour, stands) => {
      if (!part) return;
      const height = count === 1 ? size : Math.max(1, (size * part) / count);
      pen.globalAlpha = this.#highlit === null || stands ? 1 : 0.18;
      pen.fillStyle = colour;
      pen.fillRect(x, Math.max(y, bottom - height), size, Math.min(height, bottom - y));
      bottom -= height;
    };
    if (owned) fill(owned, this.#requests[owner].colour, this.#has(first, count, false));
    if (shared) fill(shared, colours.shared, this.#has(first, count, true));
    fill(cached, colours.cached, false);
    pen.globalAlpha = 1;
    if (cached && count === 1 && size > 8) {
      pen.fillStyle = colours.line;
      pen.fillRect(x + size / 2 - 1.5, y + size / 2 - 1.5, 3, 3);
    }
  }

  // What a cell stands for: its blocks by kind, and who has most of those with one owner.
  #tally(cell) {
    const { per } = this.#grid;
    const first = cell * per;
    const count = Math.min(per, this.#codes.length - first);
    const seen = new Map();
    let owned = 0, shared = 0, cached = 0, owner = -1;
    for (let block = first; block < first + count; block++) {
      const code = this.#codes[block];
      if (code === FREE) continue;
      if (code === CACHED) cached++;
      else if (this.#isShared(code)) shared++;
      else {
        const who = this.#owners[code - FIRST_OWNERS][0];
        const times = (seen.get(who) ?? 0) + 1;
        seen.set(who, times);
        if (owner < 0 || times > seen.get(owner)) owner = who;
        owned++;
      }
    }
    return { first, count, owned, shared, cached, owner, seen };
  }

  // Whether the request that stands out has a block here, alone or shared.
  #has(first, count, shared) {
    if (this.#highlit === null) return false;
    for (let block = first; block < first + count; block++) {
      const code = this.#codes[block];
      if (code < FIRST_OWNERS || this.#isShared(code) !== shared) continue;
      if (this.#owners[code - FIRST_OWNERS].some((who) => this.#requests[who].key === this.#highlit)) return true;
    }
    return false;
  }

  #isShared(code) {
    return code >= FIRST_OWNERS && this.#owners[code - FIRST_OWNERS].length > 1;
  }

  #count(wanted) {
    let count = 0;
    for (const code of this.#codes) if (wanted(code)) count++;
    return count;
  }

  get #numCells() {
    return Math.ceil(this.#codes.length / this.#grid.per);
  }

  #cellOf({ offsetX, offsetY }) {
    const { columns, pitch } = this.#grid;
    const column = Math.floor(offsetX / pitch);
    const cell = Math.floor(offsetY / pitch) * columns + column;
    return column >= 0 && column < columns && cell >= 0 && cell < this.#numCells ? cell : null;
  }

  #onKey(event) {
    const { columns, rows } = this.#grid;
    const moves = {
      ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, PageUp: -columns * Math.ceil(rows / 4),
      PageDown: columns * Math.ceil(rows / 4), Home: -Infinity, End: Infinity,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.#point(Math.max(0, Math.min(this.#numCells - 1, (this.#at ?? 0) + moves[event.key])));
  }

  #point(cell) {
    if (cell === this.#at) return;
    this.#at = cell;
    if (this.#colours) this.#draw();
    this.#read();
  }

  // Says what is pointed at.
  #read() {
    const points = this.#at !== null && this.#at < this.#numCells;
    const text = points ? this.#describe(this.#at) : this.#summary();
    this.readout.setAttribute("aria-live", points ? "polite" : "off"); // the summary changes twice a second
    if (this.readout.textContent !== text) this.readout.textContent = text;
  }

  #summary() {
    if (!this.#codes.length) return "";
    const { per } = this.#grid;
    const owned = this.#count((code) => code >= FIRST_OWNERS);
    const parts = [`${owned} in use`, `${this.#count((code) => this.#isShared(code))} of them shared`];
    parts.push(`${this.#count((code) => code === CACHED)} cached`, `${this.#count((code) => code === FREE)} free`);
    return parts.join(", ") + (per > 1 ? `; a cell is ${per} blocks` : "");
  }

  #describe(cell) {
    const { first, count, owned, shared, cached, seen } = this.#tally(cell);
    if (count > 1) {
      const kinds = [[owned, "of one request"], [shared, "shared"], [cached, "cached"], [count - owned - shared - cached, "free"]];
      const said = kinds.filter(([number]) => number).map(([number, what]) => `${number} ${what}`);
      const names = [...seen].sort((a, b) => b[1] - a[1]).map(([who]) => this.#requests[who].name);
      return `Blocks ${first + 1} to ${first + count}: ${said.join(", ")}${names.length ? `; ${listed(names)}` : ""}`;
    }
    const code = this.#codes[first];
    if (code < FIRST_OWNERS) return `Block ${first + 1}: ${code === CACHED ? "cached, owned by nobody" : "free"}`;
    const names = this.#owners[code - FIRST_OWNERS].map((who) => this.#requests[who].name);
    return `Block ${first + 1}: ${names.length > 1 ? `shared by ${names.length}: ` : ""}${listed(names)}`;
  }
}

const listed = (names) =>
  names.slice(0, MAX_NAMES).join(", ") + (names.length > MAX_NAMES ? ` and ${names.length - MAX_NAMES} more` : "");

// The code of each block: little-endian unsigned integers, as wide as the length says.
function unpack(packed, blocks) {
  const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
  const width = bytes.length / blocks;
  const Kind = { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array }[width];
  return new Kind(bytes.buffer);
}
