// Pages that are opened from the disk may not start workers, so the search runs in a hidden frame instead.
// The theme's worker looks for this name in its parent.
window.IFrameWorker = class extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.inside = frame.contentWindow;
    this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    this.inside.importScripts = async (...urls) => {
      for (const one of urls) await this.load(one);
    };
    this.loaded = this.load(url);
  }

  load(url) {
    return new Promise((resolve, reject) => {
      const script = this.inside.document.createElement("script");
      Object.assign(script, { src: new URL(url, location), onload: resolve, onerror: reject });
      this.inside.document.head.append(script);
    });
  }

  async postMessage(data) {
    await this.loaded;
    this.inside.dispatchEvent(new MessageEvent("message", { data }));
  }

  terminate() {
    this.inside.frameElement.remove();
  }
};
if (location.protocol === "file:") window.Worker = window.IFrameWorker;
