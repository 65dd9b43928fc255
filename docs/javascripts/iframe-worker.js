/* Search in pages that are opened from a folder: a browser starts no worker for a file, so an empty frame plays its part.
 * The theme loads this before its own script, and talks to its search through Worker alone. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = this.onerror = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.frame = frame.contentWindow;
      const inside = frame.contentDocument;
      inside.open();
      inside.write(
        `<body><script>window.postMessage = message => parent.postMessage(message, "*")</` +
        `script><script src="${new URL(url, location.href)}"></` + `script>`);
      inside.close();
      window.addEventListener("message", event => {
        if (event.source !== this.frame) return;
        const answer = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(answer);
        if (this.onmessage) this.onmessage(answer);
      });
      this.ready = new Promise(resolve => frame.addEventListener("load", resolve));
    }
    postMessage(data) {
      this.ready.then(() => this.frame.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.frameElement.remove();
    }
  };
}
