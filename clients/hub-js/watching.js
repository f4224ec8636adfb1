// Who is there: what the hub says of actors that come and go, kept over lost sessions.
import { HubError } from "./errors.js"
import { settled } from "./session.js"

const EVENTS_MAX = 10_000
const GONE = new Set(["left", "expired"])

/** One watch. Whatever is missed in between shows as the difference between two looks. */
export class Watching {
  #there = new Map()
  #events = []
  #changed = settled()
  #ended = false
  #error = null

  constructor(query) {
    this.query = query
    this.id = ""
  }

  /** Everybody who is there now. */
  look(actors) {
    const now = new Map(actors.map((actor) => [actor.address, actor.version]))
    for (const [address, version] of this.#there) {
      if (!now.has(address)) this.#tell({ event: "left", actorAddress: address, capabilities: [], version, at: null })
    }
    for (const { address, capabilities, version } of actors) {
      const known = this.#there.get(address)
      const event = known === undefined ? "joined" : "updated"
      if (known !== version) this.#tell({ event, actorAddress: address, capabilities, version, at: null })
    }
    this.#there = now
  }

  /** Somebody came, went or changed. */
  take({ event, actorAddress, capabilities, version, at }) {
    if (GONE.has(event)) {
      if (!this.#there.delete(actorAddress)) return
    } else if ((this.#there.get(actorAddress) ?? -1) >= version) {
      return // the look before it had it already
    } else {
      this.#there.set(actorAddress, version)
    }
    this.#tell({ event, actorAddress, capabilities, version, at })
  }

  async next() {
    while (this.#events.length === 0) {
      if (this.#error) throw this.#error
      if (this.#ended) return null
      await this.#changed.promise
    }
    return this.#events.shift()
  }

  end(error = null) {
    this.#ended = true
    this.#error = error
    this.#wake()
  }

  #tell(event) {
    if (this.#ended) return
    if (this.#events.length < EVENTS_MAX) this.#events.push(event)
    else this.end(new HubError("inbox_full", "too many came and went while nobody looked"))
    this.#wake()
  }

  #wake() {
    this.#changed.resolve()
    this.#changed = settled()
  }
}
