// The same reading of a log as `mmqa diagnose`, on the same catalogue (assets/catalogue.json): find the lines that carry
// a signature, clean them as agent/symptoms/clean.py does, and name the first real cause. No page of its own; used by
// the search field and by the page "Paste a log".
var Diagnose = (function () {
  "use strict";
  const SLICE = 4 << 20; // bytes of a file read at a time
  const WINDOW = 4096; // characters of a very long line kept on each side of a literal
  const TRACE = "Traceback (most recent call last)";
  const TRACE_LINES = 400;
  const WRITER = /\([^()]*pid=[0-9]+[^()]*\)|\[rollout [0-9A-Za-z_-]+\]/g;
  const TIME = /(?:([0-9]{4})-)?([0-9]{2})-([0-9]{2})[T ]([0-9]{2}):([0-9]{2}):([0-9]{2})/;

  // Places where a log names a version.
  const VERSION = /(?:LLM engine \(v|vLLM API server version |\b(vllm|verl|agentlightning|transformers|ray|torch|numpy)==)([0-9]+\.[0-9]+[0-9A-Za-z.+]*)/g;
  const VERSION_LITERALS = ["LLM engine (v", "vLLM API server version ", "=="];

  const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  const writer = (raw) => (raw.slice(0, 300).match(WRITER) || []).join("");

  function time(raw) {
    const found = TIME.exec(raw.slice(0, 300));
    return found ? found[2] + "-" + found[3] + " " + found[4] + ":" + found[5] + ":" + found[6] : null;
  }

  function role(match) {
    const { entry, signature } = match;
    const tooFew = signature.min_count < 2 || match.count < signature.min_count;
    if (entry.severity === "noise" || (signature.role === "note" && tooFew)) return "note";
    return entry.consequence ? "consequence" : "cause";
  }

  // One item for each symptom of a log: its first line of the weightiest role.
  function merged(scan) {
    const found = new Map();
    for (const match of scan.matches) {
      const known = found.get(match.entry.slug);
      const one = { ...match, role: role(match) };
      if (!known || (known.role === "note" && one.role !== "note")) {
        one.count += known ? known.count : 0;
        found.set(match.entry.slug, one);
      } else known.count += match.count;
    }
    return [...found.values()].sort((a, b) => a.line - b.line);
  }

  // "0.22.1rc1" as numbers that compare; a pre-release stands before its release.
  function numbers(version) {
    const found = /^([0-9.]+)(a|b|rc|\.?dev)?/.exec(version.trim());
    if (!found) return null;
    const parts = found[1].split(".").filter(Boolean).map(Number);
    while (parts.length < 4) parts.push(0);
    return [...parts.slice(0, 4), found[2] ? 0 : 1];
  }

  function within(version, range) {
    const have = numbers(version);
    if (!have) return null;
    return range.split(",").every((part) => {
      const [, sign, text] = /^\s*([<>=!]+)\s*(.+)$/.exec(part);
      const want = numbers(text);
      const at = have.findIndex((number, index) => number !== want[index]);
      const order = at < 0 ? 0 : have[at] - want[at];
      return { ">=": order >= 0, "<=": order <= 0, ">": order > 0, "<": order < 0, "==": order === 0, "!=": order !== 0 }[sign];
    });
  }

  // The causes that the known versions do not rule out, those that they confirm first.
  function possible(causes, versions) {
    const rated = causes.map((cause) => {
      const known = cause.package && cause.versions && versions[cause.package];
      return [cause, known ? within(known, cause.versions) : null];
    });
    const left = rated.filter(([, applies]) => applies !== false);
    const kept = left.length ? left : rated;
    return [...kept.filter(([, yes]) => yes === true), ...kept.filter(([, yes]) => yes !== true)].map(([cause]) => cause);
  }

  // A log line without paths, addresses, ids and numbers: what other people's logs have in common with it.
  function searchText(line) {
    return line
      .replace(/'[^' ]*\/[^']*'|"[^" ]*\/[^"]*"|(?:[A-Za-z]+:\/\/|\/)[^ ,;)]+/g, " ")
      .replace(/0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b|\b[0-9]+(?:\.[0-9]+)*\b/g, " ")
      .split(/\s+/).filter(Boolean).join(" ").slice(0, 150);
  }

  class Catalogue {
    constructor(data) {
      this.anywhere = new RegExp(data.clean.anywhere, "g");
      this.prefixes = data.clean.prefixes.map((one) => new RegExp(one));
      this.suffix = new RegExp(data.clean.suffix);
      this.entries = new Map();
      this.byLiteral = new Map();
      for (const entry of data.entries) {
        this.entries.set(entry.slug, entry);
        for (const one of entry.signatures) {
          const compiled = (text) => (text ? new RegExp(text) : null);
          const signature = {
            ...one, entry, pattern: compiled(one.regex), clearing: compiled(one.cleared_by), by: compiled(one.writer),
          };
          if (!this.byLiteral.has(one.needs)) this.byLiteral.set(one.needs, []);
          this.byLiteral.get(one.needs).push(signature);
        }
      }
      this.finder = new RegExp([TRACE, ...this.byLiteral.keys()].map(escaped).join("|"));
      this.literals = [...this.byLiteral.keys()];
    }

    clean(raw) {
      let line = raw.replace(this.anywhere, "");
      for (let before = null; before !== line; ) {
        before = line;
        for (const prefix of this.prefixes) line = line.replace(prefix, "");
      }
      return line.replace(this.suffix, "").replace(/\s+$/, "");
    }

    // What the logs say together: the first cause, what followed, other causes, and lines that healthy logs have too.
    verdict(scans) {
      const versions = Object.assign({}, ...scans.map((scan) => scan.versions).reverse());
      const files = scans.map((scan) => merged(scan));
      let found = files.flat();
      if (files.filter((one) => one.length).length > 1 && found.every((one) => one.time)) {
        found = [...found].sort((a, b) => (a.time < b.time ? -1 : a.time > b.time ? 1 : 0));
      }
      const causes = found.filter((one) => one.role === "cause");
      const stops = ({ entry }) => ["crash", "hang"].includes(entry.severity) && !entry.one_rollout;
      const fast = causes.filter((one) => one.entry.severity !== "slow");
      const whole = fast.some(stops) ? fast.filter((one) => !one.entry.one_rollout) : fast;
      const counted = (one) => one.signature.role === "note"; // a cause only because such lines are many
      const ranked = whole.some((one) => stops(one) && !counted(one)) ? whole.filter((one) => !counted(one)) : whole;
      const first = ranked[0] || causes[0] || null;
      return {
        first, found, versions,
        consequences: found.filter((one) => one.role === "consequence"),
        others: causes.filter((one) => one !== first),
        notes: found.filter((one) => one.role === "note"),
        causes: (entry) => possible(entry.causes, versions),
        follows: (text) => this.follows(text),
        search: searchText,
      };
    }

    // Whether a log line is known as a consequence.
    follows(text) {
      const signatures = [...this.byLiteral.values()].flat().filter((one) => one.entry.consequence);
      return signatures.some((one) => text.includes(one.needs) && (!one.pattern || one.pattern.test(text)));
    }

    // The entry that one or a few pasted lines name, or null.
    nameOf(text) {
      const scan = new Scan(this, "search");
      scan.feed(text + "\n");
      const verdict = this.verdict([scan.done()]);
      return verdict.first ? verdict.first.entry.slug : verdict.found.length ? verdict.found[0].entry.slug : null;
    }
  }

  // One log, fed piece by piece; memory does not grow with its length.
  class Scan {
    constructor(catalogue, name) {
      Object.assign(this, { catalogue, name, lines: 0, found: new Map(), versions: {}, traceback: null, tracebackLine: 0 });
      this.rest = "";
      this.time = null;
      this.trace = null;
    }

    feed(text) {
      const parts = (this.rest + text).split("\n");
      this.rest = parts.pop();
      if (this.rest.length > SLICE) this.rest = this.rest.slice(0, WINDOW) + this.rest.slice(-SLICE / 2);
      for (const raw of parts) this.line(raw);
    }

    done() {
      if (this.rest) this.line(this.rest);
      this.rest = "";
      if (this.trace && !this.traceback) this.traceback = this.trace.last;
      return this;
    }

    line(raw) {
      this.lines += 1;
      this.time = time(raw) || this.time;
      if (this.trace && !this.trace.over) this.follow(raw);
      if (VERSION_LITERALS.some((one) => raw.includes(one))) {
        for (const [, name, version] of raw.matchAll(VERSION)) {
          const known = name || "vllm";
          if (!(known in this.versions)) this.versions[known] = version.replace(/\.+$/, "");
        }
      }
      const hit = this.catalogue.finder.exec(raw);
      if (!hit) return;
      if (!this.trace && raw.includes(TRACE)) {
        const before = this.catalogue.clean(raw).split("Traceback")[0];
        const group = before.endsWith("+ Exception Group ");
        this.trace = { writer: writer(raw), before: group ? "" : before, group, left: TRACE_LINES, last: null, over: false };
        this.tracebackLine = this.lines;
      }
      const near = raw.length > 2 * WINDOW ? raw.slice(Math.max(0, hit.index - WINDOW), hit.index + WINDOW) : raw;
      const line = this.catalogue.clean(near);
      for (const literal of this.catalogue.literals) {
        if (!raw.includes(literal)) continue;
        for (const signature of this.catalogue.byLiteral.get(literal)) this.compare(signature, line, raw);
      }
    }

    compare(signature, line, raw) {
      const known = this.found.get(signature);
      if (signature.by && !signature.by.test(writer(raw))) return;
      if (!line.includes(signature.needs) || (signature.pattern && !signature.pattern.test(line))) {
        if (known && signature.clearing && signature.clearing.test(line)) this.found.delete(signature);
      } else if (known) known.count += 1;
      else {
        this.found.set(signature, {
          entry: signature.entry, signature, line: this.lines, text: line.slice(0, 500), time: this.time, count: 1,
          log: this.name,
        });
      }
    }

    follow(raw) {
      const trace = this.trace;
      if (writer(raw) !== trace.writer) return;
      trace.left -= 1;
      let line = this.catalogue.clean(raw);
      if (line.startsWith(trace.before)) line = line.slice(trace.before.length);
      if (trace.group) line = /^ *\+-/.test(line) ? "" : line.replace(/^ *\| ?/, "");
      if (line && !/^(?:[ \t\u2502\u256d\u2570]|Traceback)/.test(line)) {
        trace.last = line.slice(0, 500);
        trace.over = !(trace.group && line.includes("sub-exception"));
        if (trace.over) this.traceback = trace.last;
      }
      if (trace.over) return;
      if (trace.left <= 0) trace.over = true;
    }

    get matches() {
      return [...this.found.values()].sort((a, b) => a.line - b.line);
    }
  }

  // As encoding_of in agent/symptoms/logs.py. Throws for what is no text.
  function encoding(head, name) {
    if (head[0] === 0xff && head[1] === 0xfe) return "utf-16le";
    if (head[0] === 0xfe && head[1] === 0xff) return "utf-16be";
    const packed = [[0x1f, 0x8b], [0x42, 0x5a, 0x68], [0xfd, 0x37, 0x7a, 0x58, 0x5a], [0x28, 0xb5, 0x2f, 0xfd]];
    if (packed.some((magic) => magic.every((byte, index) => head[index] === byte))) {
      throw new Error(name + ": this file is compressed; unpack it first");
    }
    const even = head.filter((byte, index) => byte === 0 && index % 2 === 0).length;
    const odd = head.filter((byte, index) => byte === 0 && index % 2 === 1).length;
    if (even + odd > head.length * 0.3 && Math.min(even, odd) * 10 <= Math.max(even, odd)) {
      return odd > even ? "utf-16le" : "utf-16be";
    }
    const control = (byte) => (byte > 0 && byte < 8) || (byte > 13 && byte < 27) || (byte > 27 && byte < 32) || byte === 127;
    if (even + odd + head.filter(control).length > head.length * 0.02) throw new Error(name + ": not a text file");
    return "utf-8";
  }

  async function scanFile(catalogue, file, progress) {
    const decoder = new TextDecoder(encoding(new Uint8Array(await file.slice(0, 65536).arrayBuffer()), file.name));
    const scan = new Scan(catalogue, file.name);
    for (let at = 0; at < file.size; at += SLICE) {
      scan.feed(decoder.decode(await file.slice(at, at + SLICE).arrayBuffer(), { stream: true }));
      if (progress) progress(Math.min(1, (at + SLICE) / file.size));
    }
    scan.feed(decoder.decode());
    return scan.done();
  }

  return { Catalogue, Scan, scanFile };
})();
if (typeof module !== "undefined") module.exports = Diagnose;
