// Search on pages opened from the disk: browsers start no worker from file://, so the same script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html><title>search</title><body></body>"
      this.inside = new Promise((ready) => {
        frame.onload = () => {
          const inside = frame.contentWindow
          // the script answers with postMessage(answer), as a worker does
          inside.postMessage = (data) => this.onmessage?.(new MessageEvent("message", { data }))
          const script = inside.document.createElement("script")
          script.src = new URL(url, location.href)
          script.onload = () => ready(inside)
          inside.document.body.append(script)
        }
      })
      this.terminate = () => frame.remove()
      document.body.append(frame)
    }
    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
  }
}
