// What has come and was not taken yet.
import { settled } from "./settled.js"
import type { Settled } from "./settled.js"
import type { Message } from "./types.js"

/** A browser cannot make a socket wait: whoever leaves more than `max` messages untaken has stopped reading. */
export class Inbox {
  readonly #messages: Message[] = []
  #taker: Settled<Message | null> | null = null
  #ended = false

  constructor(readonly max: number) {}

  /** False if there is no room for it. */
  put(message: Message): boolean {
    if (this.#messages.length >= this.max) return false
    if (this.#taker) this.#taker.resolve(message)
    else this.#messages.push(message)
    this.#taker = null
    return true
  }

  /** The next message; null if none came in time, or none will come any more. */
  async take(timeoutMs?: number): Promise<Message | null> {
    const known = this.#messages.shift()
    if (known !== undefined) return known
    if (this.#ended) return null
    if (this.#taker) throw new Error("somebody waits for the next message already")
    const taker = (this.#taker = settled<Message | null>())
    const timer = timeoutMs === undefined ? undefined : setTimeout(() => taker.resolve(null), timeoutMs)
    try {
      return await taker.promise
    } finally {
      clearTimeout(timer)
      if (this.#taker === taker) this.#taker = null
    }
  }

  end(): void {
    this.#ended = true
    this.#taker?.resolve(null)
  }
}
