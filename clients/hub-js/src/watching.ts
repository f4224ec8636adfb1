// Who is there: what the hub says of actors that come and go, kept over lost sessions.
import { HubError } from "./errors.js"
import { settled } from "./settled.js"
import type { Actor, Presence } from "./types.js"

const EVENTS_MAX = 10_000
const GONE: ReadonlySet<string> = new Set(["left", "expired"])

export interface Watched {
  pattern: string
  capability?: string
}

/** What the hub says of a watch: who was there at an offset, or one event. */
export type Told = Look | (Presence & { watchId: string; actors?: undefined })

export interface Look {
  watchId: string
  actors: Actor[]
  hasMore: boolean
  offset: string
}

/** One watch. Whatever is missed in between shows as the difference between two looks. */
export class Watching {
  /** In the current session; empty until the hub has the watch. */
  id = ""
  #loading: Look | null = null
  /** Events after the snapshot that is loading. */
  #early: Presence[] = []
  #there = new Map<string, number>()
  #events: Presence[] = []
  #changed = settled()
  #ended = false
  #error: Error | null = null

  constructor(readonly query: Watched) {}

  get ended(): boolean {
    return this.#ended
  }

  /** Start loading a snapshot, which replaces one that is still loading. */
  begin(look: Look): void {
    this.id = look.watchId
    this.#loading = look
    this.#early = []
  }

  isLoading(look: Look): boolean {
    return this.#loading === look
  }

  /** Everybody who is there now. */
  look(found: Actor[]): void {
    // A durable address without a connection is registered, but its actor has left.
    const actors = found.filter((actor) => actor.connectionId !== "")
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
    const early = this.#early
    this.#loading = null
    this.#early = []
    for (const event of early) this.take(event)
  }

  /** Somebody came, went or changed. */
  take(presence: Presence): void {
    if (this.#loading) {
      if (this.#early.length < EVENTS_MAX) this.#early.push(presence)
      else this.#endOverflown()
      return
    }
    const { event, actorAddress, capabilities, version, at } = presence
    if (GONE.has(event)) {
      if (!this.#there.delete(actorAddress)) return
    } else if ((this.#there.get(actorAddress) ?? -1) >= version) {
      return // the look before it had it already
    } else {
      this.#there.set(actorAddress, version)
    }
    this.#tell({ event, actorAddress, capabilities, version, at })
  }

  async next(): Promise<Presence | null> {
    for (;;) {
      const event = this.#events.shift()
      if (event !== undefined) return event
      if (this.#error) throw this.#error
      if (this.#ended) return null
      await this.#changed.promise
    }
  }

  end(error: Error | null = null): void {
    this.#ended = true
    this.#error = error
    this.#wake()
  }

  #tell(event: Presence): void {
    if (this.#ended) return
    if (this.#events.length < EVENTS_MAX) this.#events.push(event)
    else this.#endOverflown()
    this.#wake()
  }

  #endOverflown(): void {
    this.#events = []
    this.#early = []
    this.end(new HubError("inbox_full", `more than ${EVENTS_MAX} unread presence events`))
  }

  #wake(): void {
    this.#changed.resolve()
    this.#changed = settled()
  }
}
