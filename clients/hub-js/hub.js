// Everything an actor does at the hub.
import { HubError } from "./errors.js"
import { Session, settled, socketUrl } from "./session.js"
import { Watching } from "./watching.js"

const TIMEOUTS = { connect: 5000, register: 5000, heartbeat: 10_000, ask: 30_000 }
const RECONNECT = { first: 1000, max: 30_000 }
const REGISTER_TRIES = 3
const TTL_S = 300
// A browser cannot make a socket wait. Whoever leaves so much untaken has stopped reading.
const INBOX_MAX = 10_000
const EARLY_MAX = 10_000

/** An actor's place at the hub. `connect` it first, and `close` it in the end. */
export class Hub {
  #session
  #place
  #inbox = []
  #taker = null
  #ended = null
  #held = new Map()
  #followed = new Map()
  #watched = new Map()
  #early = []
  #paused = new Set()
  #pausedAll = false
  #resumed = settled()
  #timeouts

  constructor(base, options = {}) {
    this.#timeouts = { ...TIMEOUTS, ...options.timeouts }
    this.#place = options
    this.#session = new Session({
      url: socketUrl(base),
      address: options.address ?? `@(browser/${crypto.randomUUID()})`,
      token: options.token,
      capabilities: options.capabilities ?? [],
      timeouts: this.#timeouts,
      reconnect: { ...RECONNECT, ...options.reconnect },
      WebSocket: options.WebSocket ?? globalThis.WebSocket,
      deliver: (message) => this.#deliver(message),
      notice: (message) => this.#noticed(message),
      restore: () => this.#restore(),
      ended: (error) => this.#end(error),
    })
  }

  // -- the session

  /** Who the hub says we are. */
  get identity() {
    return this.#session.identity
  }

  get sessionId() {
    return this.#session.welcome?.sessionId ?? null
  }

  /** Whether the session is the one from before the last lost connection. */
  get resumed() {
    return this.#session.welcome?.resumed ?? false
  }

  async connect() {
    await this.#session.start()
  }

  async close() {
    for (const held of this.#held.values()) clearTimeout(held.timer)
    await this.#session.stop()
  }

  /** Lose the connection on purpose, to see what happens. */
  drop() {
    this.#session.drop()
  }

  /** Any message of the protocol that is answered, for what has no method here. */
  request(type, payload, { metadata, timeoutMs } = {}) {
    return this.#session.ask({ type, payload, metadata }, { timeoutMs })
  }

  /** Go on under a new token. Resolves to when it expires. */
  async refreshToken(token) {
    const known = this.#place.token
    const authToken = token ?? (typeof known === "function" ? await known() : known)
    const metadata = { authToken, nonce: crypto.randomUUID() }
    const answer = await this.#session.ask({ type: "hub:refresh_token", metadata })
    return answer.payload.tokenExpiresAt
  }

  // -- addresses

  /** Take an address, and keep it: it is renewed, and taken again by every new session. */
  register(address, options = {}) {
    const { capabilities = ["actor"], ttlSeconds = TTL_S, metadata = {}, ...rest } = options
    return this.#register({ actorAddress: address ?? this.identity, capabilities, metadata, ttlSeconds, ...rest })
  }

  async unregister(address) {
    this.#letGo(address)
    await this.#session.ask({ type: "hub:unregister", payload: { actorAddress: address } })
  }

  /** All actors that match, sorted by address, page by page as needed. */
  discover(pattern = "*", options = {}) {
    return this.#discover({ pattern, ...options })
  }

  async *#discover(query, urgent = false) {
    let cursor = null
    do {
      const payload = { limit: 100, ...query, cursor }
      const { payload: page } = await this.#session.ask({ type: "hub:discover", payload }, { urgent })
      yield* page.actors
      cursor = page.hasMore ? page.cursor : null
    } while (cursor !== null)
  }

  /** Who is there, and from then on who comes, goes or changes. It goes on over lost sessions. */
  async *watch(pattern = "*", { capability } = {}) {
    const watching = new Watching({ pattern, capability })
    await this.#watch(watching)
    try {
      for (let event = await watching.next(); event !== null; event = await watching.next()) yield event
    } finally {
      if (this.#watched.delete(watching.id)) {
        const payload = { action: "unwatch", watchId: watching.id }
        await this.#session.ask({ type: "hub:presence", payload }).catch(() => {})
      }
    }
  }

  // -- messages

  /** Tell somebody something. With `ack` it resolves when the message has come so far. */
  async send(to, type, data = null, { ack, sender, durable, ttl, metadata, correlationId, timeoutMs } = {}) {
    await this.#untilOpen(to)
    const payload = { to, type, data, ack, durable }
    const request = { type: "hub:send", payload, metadata, ttl, correlationId, from: sender }
    if (ack === undefined) return { messageId: await this.#session.tell(request), status: "sent" }
    return (await this.#session.ask(request, { timeoutMs })).payload
  }

  /** Ask somebody something, and wait for the reply. `onPart` gets what comes before the last one. */
  async ask(to, type, data = null, { sender, metadata, timeoutMs = this.#timeouts.ask, onPart } = {}) {
    await this.#untilOpen(to)
    const payload = { to, type, data, expectReply: true }
    const request = { type: "hub:send", payload, metadata, ttl: timeoutMs, from: sender }
    const { payload: reply, from } = await this.#session.ask(request, { timeoutMs, onPart })
    if (reply.ok !== false) return reply.data
    const { code = "failed", message = "the actor failed", ...details } = reply.error ?? {}
    throw new HubError(code, message, { ...details, from })
  }

  /** Answer a message that wants a reply. All but the last answer have `final: false`. */
  async reply(message, data = null, { final = true } = {}) {
    await this.#reply(message, { ok: true, data, final })
  }

  /** Say that it cannot be answered. The asker gets an error with this code. */
  async replyError(message, code, text) {
    await this.#reply(message, { ok: false, error: { code, message: text }, final: true })
  }

  /** Send to everybody who is registered now, or to those who match. */
  async broadcast(type, data = null, { pattern, capability, excludeSelf = true, timeoutMs } = {}) {
    const payload = { type, data, excludeSelf, pattern }
    const metadata = capability === undefined ? {} : { targetCapability: capability }
    const request = { type: "hub:broadcast", pattern: "tell", payload, metadata }
    return (await this.#session.ask(request, { timeoutMs })).payload
  }

  /** What comes for any address or subscription of ours, for as long as the client is open. */
  async *messages() {
    for (let message = await this.nextMessage(); message !== null; message = await this.nextMessage()) {
      yield message
    }
  }

  /** The next of them; null if none came in time, or none will come any more. */
  async nextMessage(timeoutMs) {
    if (this.#inbox.length > 0) return this.#inbox.shift()
    if (this.#ended) return null
    if (this.#taker) throw new Error("somebody waits for the next message already")
    this.#taker = settled()
    const timer = timeoutMs === undefined ? undefined : setTimeout(() => this.#taker?.resolve(null), timeoutMs)
    try {
      return await this.#taker.promise
    } finally {
      clearTimeout(timer)
      this.#taker = null
    }
  }

  // -- topics

  /** Get what is published to a topic. `+` stands for one segment, a last `#` for all the rest. */
  async subscribe(topic, options = {}) {
    const payload = { topic, ...options }
    const { payload: subscription } = await this.#session.ask({ type: "hub:subscribe", payload })
    this.#followed.set(subscription.subscriptionId, { payload, id: subscription.subscriptionId })
    return subscription
  }

  async unsubscribe({ subscriptionId }) {
    // A new session has given it another id.
    const id = this.#followed.get(subscriptionId)?.id ?? subscriptionId
    this.#followed.delete(subscriptionId)
    await this.#session.ask({ type: "hub:unsubscribe", payload: { subscriptionId: id } })
  }

  async publish(topic, type, data = null, { durable, metadata, timeoutMs } = {}) {
    const request = { type: "hub:publish", payload: { topic, type, data, durable }, metadata }
    return (await this.#session.ask(request, { timeoutMs })).payload
  }

  // -- mailboxes

  /** A page of what is kept for an address. Reading moves nothing. */
  async readMailbox(address, { offset = "committed", limit = 100, ...rest } = {}) {
    const payload = { actorAddress: address ?? this.identity, offset, limit, ...rest }
    return (await this.#session.ask({ type: "hub:mailbox_read", payload })).payload
  }

  /** A kept message was processed, and what was before it, but in a durable group: there it stands alone. */
  async commit(message) {
    const mailbox = message.metadata.mailbox
    if (!mailbox) return null
    const payload = { actorAddress: message.to, ...mailbox }
    return (await this.#session.ask({ type: "hub:mailbox_commit", payload })).payload
  }

  /** These kept messages were processed, and nothing is said of others: for members of durable groups. */
  async commitEach(messages) {
    const places = new Map()
    for (const { to, metadata } of messages) {
      if (!metadata.mailbox) continue
      const { offset, ...place } = metadata.mailbox
      const key = JSON.stringify([to, place])
      if (!places.has(key)) places.set(key, { actorAddress: to, ...place, offsets: [] })
      places.get(key).offsets.push(offset)
    }
    for (const payload of places.values()) await this.#session.ask({ type: "hub:mailbox_commit", payload })
  }

  // -- inside

  async #watch(watching, urgent = false) {
    const payload = { action: "watch", ...watching.query }
    const answer = await this.#session.ask({ type: "hub:presence", payload }, { urgent })
    await this.#look(watching, answer.payload, urgent)
  }

  /** Everybody who was there at an offset; what came after it is told after it. */
  async #look(watching, { watchId, actors, hasMore, offset }, urgent) {
    let found = actors
    if (hasMore) {
      found = []
      for await (const actor of this.#discover({ ...watching.query, asOf: offset }, urgent)) found.push(actor)
    }
    watching.look(found)
    watching.id = watchId
    this.#watched.set(watchId, watching)
    const early = this.#early
    this.#early = []
    for (const payload of early) this.#present(payload)
  }

  #present(payload) {
    const watching = this.#watched.get(payload.watchId)
    if (!watching) {
      if (this.#early.length < EARLY_MAX) this.#early.push(payload)
    } else if (payload.actors) {
      // We fell behind, and are told from the start.
      this.#watched.delete(watching.id)
      this.#look(watching, payload).catch((error) => watching.end(error))
    } else {
      watching.take(payload)
    }
  }

  #reply(message, payload) {
    return this.#session.tell({ type: "hub:reply", payload, correlationId: message.id, from: message.to })
  }

  async #register(payload, urgent = false) {
    for (let tries = 1; ; tries += 1) {
      try {
        const request = { type: "hub:register", payload }
        const answer = await this.#session.ask(request, { timeoutMs: this.#timeouts.register, urgent })
        this.#hold(payload, answer.payload)
        return answer.payload
      } catch (error) {
        // Registering twice is registering once.
        if (error.code !== "timeout" || tries === REGISTER_TRIES) throw error
      }
    }
  }

  /** Renewed after half of its time: one renewal may be lost, and the address is still ours. */
  #hold(payload, registration, afterMs = payload.ttlSeconds * 500) {
    clearTimeout(this.#held.get(registration.actorAddress)?.timer)
    const timer = setTimeout(() => this.#renew(payload, registration), afterMs)
    timer.unref?.()
    this.#held.set(registration.actorAddress, { payload, timer })
  }

  async #renew(payload, registration) {
    this.#hold(payload, registration, 5000)
    const renewal = { type: "hub:renew", payload: { renewalToken: registration.renewalToken } }
    try {
      const answer = await this.#session.ask(renewal)
      if (this.#held.has(registration.actorAddress)) this.#hold(payload, answer.payload)
    } catch (error) {
      if (error.code === "invalid_token") await this.#register(payload).catch(() => {})
    }
  }

  #letGo(address) {
    clearTimeout(this.#held.get(address)?.timer)
    this.#held.delete(address)
  }

  /** A new session knows nothing of the one before. */
  async #restore() {
    this.#resume(undefined)
    for (const [address, { payload }] of [...this.#held]) {
      await this.#again(() => this.#register(payload, true), () => this.#letGo(address))
    }
    for (const [known, followed] of [...this.#followed]) {
      const { from, ...payload } = followed.payload
      await this.#again(
        async () => {
          const answer = await this.#session.ask({ type: "hub:subscribe", payload }, { urgent: true })
          followed.id = answer.payload.subscriptionId
        },
        () => this.#followed.delete(known),
      )
    }
    const watched = [...this.#watched.values()]
    this.#watched.clear()
    for (const watching of watched) await this.#watch(watching, true)
  }

  async #again(work, giveUp) {
    try {
      await work()
    } catch (error) {
      if (error.retryable) throw error
      giveUp()
    }
  }

  #deliver(message) {
    if (this.#inbox.length >= (this.#place.inboxMax ?? INBOX_MAX)) {
      this.#session.fail(new HubError("inbox_full", "too many messages have come that nobody took"))
      return
    }
    if (this.#taker) this.#taker.resolve(message)
    else this.#inbox.push(message)
    this.#taker = null
  }

  #noticed(message) {
    const { type, payload } = message
    if (type === "hub:pause") {
      if (payload.targets) for (const target of payload.targets) this.#paused.add(target)
      else this.#pausedAll = true
    } else if (type === "hub:resume") {
      this.#resume(payload?.targets)
    } else if (type === "hub:presence") {
      this.#present(payload)
    } else if (type === "hub:unregistered") {
      this.#letGo(payload.actorAddress)
    } else if (type === "hub:token_expiring" && typeof this.#place.token === "function") {
      this.refreshToken().catch(() => {})
    }
    this.#place.onNotice?.(message)
  }

  #resume(targets) {
    if (targets) for (const target of targets) this.#paused.delete(target)
    else [this.#paused, this.#pausedAll] = [new Set(), false]
    this.#resumed.resolve()
    this.#resumed = settled()
  }

  /** The hub asks for a pause when a recipient cannot keep up. */
  async #untilOpen(target) {
    while (this.#pausedAll || this.#paused.has(target)) await this.#resumed.promise
  }

  #end(error) {
    this.#ended = error
    for (const held of this.#held.values()) clearTimeout(held.timer)
    this.#taker?.resolve(null)
    for (const watching of this.#watched.values()) watching.end()
    this.#resume(undefined)
    this.#place.onEnd?.(error)
  }
}
