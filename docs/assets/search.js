// Makes the search field take raw log lines. The theme hands what is typed to a worker that knows lunr's query
// language, in which ":", "^", "~", "+" and "-" are operators: most log lines are errors to it. Here the line is cleaned
// first, and the page whose signature the line carries is put in front of what the word statistics found.
(function () {
  "use strict";
  const SETUP = 0, QUERY = 2, RESULT = 3; // the theme's message types
  const address = new URL(document.currentScript.dataset.catalogue, document.baseURI);
  let catalogue = null;
  let wanted = null; // slug that the line in the field names
  let documents = [];

  function load() {
    if (!catalogue) {
      catalogue = fetch(address).then((answer) => answer.json()).then((data) => new Diagnose.Catalogue(data));
      catalogue.catch(() => { catalogue = null; });
    }
    return catalogue;
  }

  // Words alone; of a line that is long enough, those of three letters and more.
  function plain(text) {
    const words = text.split(/[^\p{L}\p{N}_.]+/u).filter((word) => /[\p{L}\p{N}]/u.test(word));
    const longer = words.filter((word) => word.length > 2);
    return (longer.length > 2 ? longer : words).join(" ");
  }

  function first(items) {
    if (!wanted) return items;
    const ending = "s/" + wanted + "/";
    const index = items.findIndex((group) => group.length && group[0].location.split("#")[0].endsWith(ending));
    if (index >= 0) return [items[index], ...items.slice(0, index), ...items.slice(index + 1)];
    const page = documents.find((one) => one.location.endsWith(ending));
    return page ? [[{ ...page, score: 1, terms: {} }], ...items] : items;
  }

  const Plain = window.Worker;
  window.Worker = class extends Plain {
    postMessage(message, ...rest) {
      if (message && message.type === SETUP && message.data && message.data.docs) documents = message.data.docs;
      if (!message || message.type !== QUERY || typeof message.data !== "string") {
        return super.postMessage(message, ...rest);
      }
      const raw = message.data;
      const send = (line) => super.postMessage({ ...message, data: plain(line) }, ...rest);
      if (raw.length < 12) {
        wanted = null;
        return send(raw);
      }
      load().then(
        (known) => {
          wanted = known.nameOf(raw);
          send(known.clean(raw));
        },
        () => send(raw),
      );
    }

    addEventListener(type, listener, ...rest) {
      if (type !== "message") return super.addEventListener(type, listener, ...rest);
      super.addEventListener(type, (event) => {
        const message = event.data;
        if (message && message.type === RESULT && message.data && Array.isArray(message.data.items)) {
          const data = { ...message.data, items: first(message.data.items) };
          event = new MessageEvent("message", { data: { ...message, data } });
        }
        (listener.handleEvent || listener).call(listener, event);
      }, ...rest);
    }
  };
})();
