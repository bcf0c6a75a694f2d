// Browsers start no worker for a page opened from a file, and the search runs in one. A hidden frame takes its place.
// Zensical would load a script of this name from the network otherwise.
if (location.protocol === "file:")
  window.Worker = class {
    constructor(address) {
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.answer = (data) => setTimeout(() => this.onmessage?.({ data: structuredClone(data) }))
      this.frame.srcdoc = `<script>postMessage = frameElement.answer</script><script src="${address}"></script>`
      this.ready = new Promise((done) => { this.frame.onload = done })
      document.body.append(this.frame)
    }
    postMessage(data) {
      const copy = structuredClone(data)
      this.ready.then(() => this.frame.contentWindow.onmessage({ data: copy }))
    }
    terminate() {
      this.frame.remove()
    }
  }
