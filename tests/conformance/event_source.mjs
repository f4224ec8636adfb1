// A stock EventSource from npm, driven line by line: one JSON command in, one JSON answer out. It applies the envelopes
// that it is sent and does nothing else: reconnecting is the EventSource's own business.
//
//   {"do": "open", "name": "a", "url": "http://..."}
//   {"do": "state", "name": "a"}
//   {"do": "close", "name": "a"}
import { createInterface } from "node:readline"
import { EventSource } from "eventsource"

const pages = new Map()

class Page {
  constructor(url) {
    this.held = {}
    this.snapshot = null
    this.positions = []
    this.opened = 0
    this.resyncs = []
    this.broken = null
    this.source = new EventSource(url)
    this.source.onopen = () => (this.opened += 1)
    this.source.onmessage = (event) => this.apply(JSON.parse(event.data))
  }

  apply(envelope) {
    const { type, payload } = envelope
    if (type === "snapshot") {
      if (payload.page === 0) this.snapshot = {}
      for (const row of payload.documents) this.snapshot[row.id] = row.version
    } else if (type === "snapshot-end") {
      this.held = this.snapshot
      this.snapshot = null
      this.positions = payload.positions
    } else if (type === "event") {
      const { op, doc } = payload.delta
      if (!this.snapshot) {
        if (envelope.seq <= this.positions[envelope.partition]) return
        this.positions[envelope.partition] = envelope.seq
      }
      const held = this.snapshot ?? this.held
      if (op === "delete") delete held[doc.id]
      else held[doc.id] = doc.version
    } else if (type === "resync-required") {
      this.resyncs.push(payload.reason)
    } else if (type === "error") {
      this.broken = payload
    }
  }
}

const actions = {
  open({ name, url }) {
    pages.set(name, new Page(url))
    return {}
  },
  state({ name }) {
    const { held, snapshot, opened, resyncs, broken, source } = pages.get(name)
    return { held, whole: snapshot === null, opened, resyncs, broken, state: source.readyState }
  },
  close({ name }) {
    pages.get(name).source.close()
    pages.delete(name)
    return {}
  },
}

for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line)
  let answer
  try {
    answer = { ok: actions[command.do](command) }
  } catch (error) {
    answer = { error: String(error?.stack ?? error) }
  }
  process.stdout.write(`=> ${JSON.stringify(answer)}\n`)
}
process.exit(0)
