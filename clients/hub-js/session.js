// Staying connected: the handshake, heartbeats, reconnecting with jitter, and what was open over it.
import { HubError, errorOf, lost, timedOut } from "./errors.js"

const HUB = "@(cloudflare/signal-hub)"
const VERSION = "0.1.0"
const FEATURES = ["resume", "delivery-notices", "token-refresh", "mailbox"]
// After these, trying again by itself would only do harm.
const FINAL = new Set(["unauthorized", "version_mismatch", "duplicate_connection"])
const FIRST_TRIES = 3

/** Where the hub of a server is: its base URL, or the address of a socket. */
export function socketUrl(base) {
  const text = String(base)
  if (/^wss?:/.test(text)) return text
  if (!/^https?:/.test(text)) throw new TypeError(`not the URL of a server: ${text}`)
  return `${text.replace(/^http/, "ws").replace(/\/+$/, "")}/hub/ws`
}

/** A promise that is settled from outside. */
export function settled() {
  let resolve, reject
  const promise = new Promise((yes, no) => ([resolve, reject] = [yes, no]))
  promise.catch(() => {})
  return { promise, resolve, reject }
}

/** One session after the other, for as long as the client wants one. */
export class Session {
  #options
  #socket = null
  #asks = new Map()
  #ready = settled()
  #isReady = false
  #ended = null
  #started = false
  #complete = false
  #failures = 0
  #goodbye = {}
  #beating
  #overdue
  #acked = true
  #retrying

  constructor(options) {
    this.#options = options
    this.identity = options.address
    this.welcome = null
  }

  /** Resolves when the first session is there. */
  start() {
    this.#open()
    return this.#ready.promise
  }

  /** Send, and wait for the answer. It is sent again after a lost connection, under the same id. */
  ask(request, { timeoutMs, urgent = false, onPart } = {}) {
    if (this.#ended) return Promise.reject(this.#ended)
    const ms = timeoutMs ?? this.#options.timeouts.ask
    const ask = { request: { id: crypto.randomUUID(), pattern: "ask", ...request }, urgent, onPart, ...settled() }
    const timer = setTimeout(() => ask.reject(timedOut(request.type, ms)), ms)
    this.#asks.set(ask.request.id, ask)
    if (urgent || this.#isReady) this.#write(ask.request)
    return ask.promise.finally(() => {
      clearTimeout(timer)
      this.#asks.delete(ask.request.id)
    })
  }

  /** Send, once, and give its id. While there is no connection it waits for one. */
  async tell(request) {
    if (this.#ended) throw this.#ended
    const late = settled()
    const timer = setTimeout(() => late.reject(lost("there is no connection to the hub")), this.#options.timeouts.ask)
    try {
      await Promise.race([this.#ready.promise, late.promise])
    } finally {
      clearTimeout(timer)
    }
    const id = crypto.randomUUID()
    if (!this.#write({ id, pattern: "tell", ...request })) throw lost("the connection to the hub was lost")
    return id
  }

  /** Say goodbye, and end. */
  async stop() {
    if (this.#ended) return
    if (this.#isReady) {
      const goodbye = { type: "hub:disconnect", payload: { reason: "client_requested" } }
      await this.ask(goodbye, { timeoutMs: 2000, urgent: true }).catch(() => {})
    }
    this.#end(lost("the client is closed"))
  }

  /** End with an error, as if the hub had said so. */
  fail(error) {
    this.#end(error)
  }

  /** Lose the connection as a broken network would; the session comes back by itself. */
  drop() {
    if (this.#socket) this.#lose(this.#socket, lost("the connection was dropped"))
  }

  // -- the life of the connection

  #open() {
    const socket = new this.#options.WebSocket(this.#options.url, ["signal-hub"])
    this.#socket = socket
    this.#goodbye = {}
    let failure = new HubError("connect_failed", `no hub answers at ${this.#options.url}`, {}, true)
    const late = setTimeout(() => {
      failure = new HubError("connect_failed", "the hub did not answer in time", {}, true)
      this.#lose(socket, failure)
    }, this.#options.timeouts.connect)
    socket.onopen = () => {
      failure = lost("the connection to the hub was lost")
      this.#introduce()
        .then((welcome) => this.#begin(welcome))
        .catch((error) => {
          failure = error
          this.#lose(socket, error)
        })
        .finally(() => clearTimeout(late))
    }
    socket.onmessage = (event) => this.#take(JSON.parse(event.data))
    socket.onclose = () => {
      clearTimeout(late)
      this.#lose(socket, failure)
    }
    // Some sockets that never open tell only this.
    socket.onerror = () => {
      if (socket.readyState !== 1) socket.onclose()
    }
  }

  async #introduce() {
    const { token, capabilities, timeouts } = this.#options
    const current = typeof token === "function" ? await token() : token
    const metadata = {
      protocolVersion: VERSION,
      capabilities: [...capabilities, ...FEATURES],
      resumeToken: this.welcome?.resumeToken ?? null,
    }
    if (current) metadata.authToken = `bearer ${current}`
    const connect = { type: "hub:connect", payload: {}, metadata, ttl: timeouts.connect, from: this.#options.address }
    return this.ask(connect, { timeoutMs: timeouts.connect, urgent: true })
  }

  async #begin(welcome) {
    this.welcome = welcome.payload
    this.identity = welcome.metadata.actorIdentity ?? this.#options.address
    const socket = this.#socket
    this.#acked = true
    this.#beating = setInterval(() => this.#beat(socket), this.welcome.heartbeatInterval)
    // A session that was lost before it had everything back is resumed without it.
    if (!this.welcome.resumed) this.#complete = false
    if (!this.#complete) await this.#options.restore()
    if (socket !== this.#socket) return
    this.#complete = true
    for (const ask of this.#asks.values()) this.#write(ask.request)
    this.#failures = 0
    this.#started = this.#isReady = true
    this.#ready.resolve()
  }

  #beat(socket) {
    this.#acked = false
    const timestamp = Date.now()
    this.#write({ id: crypto.randomUUID(), type: "hub:heartbeat", pattern: "tell", payload: { timestamp } })
    this.#overdue = setTimeout(() => {
      if (!this.#acked && socket === this.#socket) this.#lose(socket, lost("the hub does not answer"))
    }, this.#options.timeouts.heartbeat)
  }

  /** This socket is no more, whoever noticed it first. */
  #lose(socket, error) {
    if (socket !== this.#socket) return
    this.#socket = null
    clearInterval(this.#beating)
    clearTimeout(this.#overdue)
    socket.close()
    for (const ask of this.#asks.values()) if (ask.urgent) ask.reject(error)
    if (this.#ended) return
    const reason = FINAL.has(this.#goodbye.reason) ? this.#goodbye.reason : error.code
    const hopeless = !this.#started && (this.#failures + 1 >= FIRST_TRIES || !error.retryable)
    if (FINAL.has(reason) || hopeless) {
      this.#end(reason === error.code ? error : new HubError(reason, `the hub ended the session: ${reason}`))
      return
    }
    if (this.#isReady) [this.#isReady, this.#ready] = [false, settled()]
    this.#retrying = setTimeout(() => this.#open(), this.#pause())
  }

  /** What the hub has asked for; else longer each time, and never at once with everybody else. */
  #pause() {
    if (Number.isFinite(this.#goodbye.reconnectAfter)) return this.#goodbye.reconnectAfter
    const { first, max } = this.#options.reconnect
    const ceiling = Math.min(max, first * 2 ** Math.min(this.#failures, 30))
    this.#failures += 1
    return ceiling * Math.random()
  }

  #end(error) {
    this.#ended = error
    clearTimeout(this.#retrying)
    for (const ask of this.#asks.values()) ask.reject(error)
    this.#ready.reject(error)
    this.#isReady = false
    this.#lose(this.#socket ?? {}, error)
    this.#options.ended(error)
  }

  // -- single messages

  #take(message) {
    if (!message.type.startsWith("hub:")) {
      this.#options.deliver(message)
    } else if (message.type === "hub:heartbeat_ack") {
      this.#acked = true
    } else if (!this.#answers(message)) {
      if (message.type === "hub:disconnect") this.#goodbye = message.payload ?? {}
      this.#options.notice(message)
    }
  }

  #answers(message) {
    const ask = this.#asks.get(message.correlationId)
    if (!ask) return false
    if (message.type === "hub:broadcast_progress") return true
    if (message.type === "hub:reply" && message.payload.final === false) {
      ask.onPart?.(message.payload.data)
      return true
    }
    const error = errorOf(message)
    if (error) ask.reject(error)
    else ask.resolve(message)
    return true
  }

  /** Whether there was a connection to write to. */
  #write({ id, from, type, payload, pattern, correlationId, metadata, ttl }) {
    const socket = this.#socket
    if (socket?.readyState !== 1) return false
    const envelope = {
      id,
      from: from ?? this.identity,
      to: HUB,
      type,
      payload: payload ?? {},
      pattern,
      correlationId: correlationId ?? null,
      timestamp: Date.now(),
      metadata: metadata ?? {},
      ttl: ttl ?? null,
      signature: null,
    }
    socket.send(JSON.stringify(envelope))
    return true
  }
}
