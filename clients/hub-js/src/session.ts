// Staying connected: the handshake, heartbeats, reconnecting with jitter, and what was open over it.
import { HubError, errorOf, lost, timedOut } from "./errors.js"
import { settled } from "./settled.js"
import type { Settled } from "./settled.js"
import type { Message, Reconnect, SocketLike, SocketMaker, Timeouts, Token } from "./types.js"

const HUB = "@(cloudflare/signal-hub)"
const VERSION = "0.1.0"
const FEATURES = ["resume", "delivery-notices", "token-refresh", "mailbox"]
// After these, trying again by itself would only do harm.
const FINAL = new Set(["unauthorized", "version_mismatch", "duplicate_connection"])
const FIRST_TRIES = 3
const OPEN = 1

export interface SessionOptions {
  url: string
  address: string
  token: Token | undefined
  capabilities: string[]
  timeouts: Timeouts
  reconnect: Reconnect
  WebSocket: SocketMaker | undefined
  deliver: (message: Message) => void
  notice: (message: Message) => void
  /** Called before the first message of each connection. */
  connected: (resumed: boolean) => void
  /** Everything that a new session has to be told again. */
  restore: () => Promise<void>
  ended: (error: HubError) => void
}

/** What is said; the rest of the envelope is the same for all. */
export interface Said {
  type: string
  payload?: unknown
  pattern?: "tell" | "ask"
  metadata?: Record<string, unknown> | undefined
  ttl?: number | undefined
  correlationId?: string | undefined
  from?: string | undefined
}

export interface Asking<Part = unknown> {
  timeoutMs?: number | undefined
  /** Part of the handshake: it belongs to this connection, and is not sent again over the next. */
  urgent?: boolean
  onPart?: ((data: Part) => void) | undefined
}

type Request = Said & { id: string }

interface Ask extends Settled<Message> {
  request: Request
  urgent: boolean
  onPart: ((data: unknown) => void) | undefined
}

interface Welcome {
  sessionId: string
  heartbeatInterval: number
  resumeToken: string | null
  resumed: boolean
}

interface Goodbye {
  reason?: string
  reconnectAfter?: number
}

type Timer = ReturnType<typeof setTimeout>

/** Where the hub of a server is: its base URL, or the address of a socket. */
export function socketUrl(base: string | URL): string {
  const text = String(base)
  if (/^wss?:/.test(text)) return text
  if (!/^https?:/.test(text)) throw new TypeError(`not the URL of a server: ${text}`)
  return `${text.replace(/^http/, "ws").replace(/\/+$/, "")}/hub/ws`
}

/** The WebSocket that was given, that of the runtime, or for Node before 22 that of the package `ws`. */
async function socketMaker(given: SocketMaker | undefined): Promise<SocketMaker> {
  const found = given ?? (globalThis.WebSocket as SocketMaker | undefined)
  if (found) return found
  const name = "ws" // not a literal: bundlers for browsers do not look for it
  try {
    return ((await import(name)) as { default: SocketMaker }).default
  } catch (cause) {
    const remedy = "use Node 22 or later, install the package ws, or give the option WebSocket"
    throw new HubError("no_websocket", `this runtime has no WebSocket: ${remedy}`, { cause })
  }
}

/** One session after the other, for as long as the client wants one. */
export class Session {
  identity: string
  welcome: Welcome | null = null
  readonly #options: SessionOptions
  #WebSocket: SocketMaker | undefined
  #socket: SocketLike | null = null
  readonly #asks = new Map<string, Ask>()
  #ready = settled()
  #isReady = false
  #ended: HubError | null = null
  #started = false
  #complete = false
  #failures = 0
  #goodbye: Goodbye = {}
  #beating: Timer | undefined
  #overdue: Timer | undefined
  #acked = true
  #retrying: Timer | undefined

  constructor(options: SessionOptions) {
    this.#options = options
    this.identity = options.address
  }

  /** Resolves when the first session is there. */
  async start(): Promise<void> {
    this.#WebSocket = await socketMaker(this.#options.WebSocket)
    if (this.#ended) throw this.#ended
    this.#open(this.#WebSocket)
    await this.#ready.promise
  }

  /** Send, and wait for the answer. It is sent again after a lost connection, under the same id. */
  ask<Payload, Part = unknown>(said: Said, asking: Asking<Part> = {}): Promise<Message<Payload>> {
    if (this.#ended) return Promise.reject(this.#ended)
    const { timeoutMs, urgent = false } = asking
    const ms = timeoutMs ?? this.#options.timeouts.ask
    const request: Request = { id: crypto.randomUUID(), pattern: "ask", ...said }
    // What an answer holds is said by whoever asks: it is not looked at here.
    const onPart = asking.onPart as Ask["onPart"]
    const ask: Ask = { request, urgent, onPart, ...settled<Message>() }
    const timer = setTimeout(() => ask.reject(timedOut(said.type, ms)), ms)
    this.#asks.set(request.id, ask)
    if (urgent || this.#isReady) this.#write(request)
    const answer = ask.promise as Promise<Message<Payload>>
    return answer.finally(() => {
      clearTimeout(timer)
      this.#asks.delete(request.id)
    })
  }

  /** Send, once, and give its id. While there is no connection it waits for one. */
  async tell(said: Said): Promise<string> {
    if (this.#ended) throw this.#ended
    const late = settled()
    const timer = setTimeout(() => late.reject(lost("there is no connection to the hub")), this.#options.timeouts.ask)
    try {
      await Promise.race([this.#ready.promise, late.promise])
    } finally {
      clearTimeout(timer)
    }
    const id = crypto.randomUUID()
    if (!this.#write({ id, pattern: "tell", ...said })) throw lost("the connection to the hub was lost")
    return id
  }

  /** Say goodbye, and end. */
  async stop(): Promise<void> {
    if (this.#ended) return
    if (this.#isReady) {
      const goodbye = { type: "hub:disconnect", payload: { reason: "client_requested" } }
      await this.ask(goodbye, { timeoutMs: 2000, urgent: true }).catch(() => {})
    }
    this.#end(lost("the client is closed"))
  }

  /** End with an error, as if the hub had said so. */
  fail(error: HubError): void {
    this.#end(error)
  }

  /** Lose the connection as a broken network would; the session comes back by itself. */
  drop(): void {
    if (this.#socket) this.#lose(this.#socket, lost("the connection was dropped"))
  }

  // -- the life of the connection

  #open(WebSocket: SocketMaker): void {
    const socket = new WebSocket(this.#options.url, ["signal-hub"])
    this.#socket = socket
    this.#goodbye = {}
    let failure = new HubError("connect_failed", `no hub answers at ${this.#options.url}`, {}, true)
    const late = setTimeout(() => {
      failure = new HubError("connect_failed", "the hub did not answer in time", {}, true)
      this.#lose(socket, failure)
    }, this.#options.timeouts.connect)
    const closed = (): void => {
      clearTimeout(late)
      this.#lose(socket, failure)
    }
    let isWelcome = false
    socket.onopen = () => {
      failure = lost("the connection to the hub was lost")
      this.#introduce()
        .then((welcome) => {
          isWelcome = true
          return this.#begin(welcome)
        })
        .catch((error: unknown) => {
          failure = asHubError(error)
          this.#lose(socket, failure)
        })
        .finally(() => clearTimeout(late))
    }
    socket.onmessage = (event: { data: string }) => {
      const message = JSON.parse(event.data) as Message
      // A hub that takes no more connections says so before it has read anything.
      const refusal = isWelcome || message.correlationId !== null ? null : errorOf(message)
      if (refusal) this.#lose(socket, refusal)
      else this.#take(message)
    }
    socket.onclose = closed
    // Some sockets that never open tell only this.
    socket.onerror = () => {
      if (socket.readyState !== OPEN) closed()
    }
  }

  async #introduce(): Promise<Message<Welcome>> {
    const { token, capabilities, timeouts } = this.#options
    const current = typeof token === "function" ? await token() : token
    const metadata: Record<string, unknown> = {
      protocolVersion: VERSION,
      capabilities: [...capabilities, ...FEATURES],
      resumeToken: this.welcome?.resumeToken ?? null,
    }
    if (current) metadata["authToken"] = `bearer ${current}`
    const connect = { type: "hub:connect", payload: {}, metadata, ttl: timeouts.connect, from: this.#options.address }
    return this.ask<Welcome>(connect, { timeoutMs: timeouts.connect, urgent: true })
  }

  async #begin({ payload, metadata }: Message<Welcome>): Promise<void> {
    this.welcome = payload
    this.identity = (metadata["actorIdentity"] as string | undefined) ?? this.#options.address
    const socket = this.#socket
    this.#acked = true
    this.#beating = setInterval(() => this.#beat(socket), payload.heartbeatInterval)
    // A session that was lost before it had everything back is resumed without it.
    if (!payload.resumed) this.#complete = false
    this.#options.connected(payload.resumed)
    if (!this.#complete) await this.#options.restore()
    if (socket !== this.#socket) return
    this.#complete = true
    for (const ask of this.#asks.values()) this.#write(ask.request)
    this.#failures = 0
    this.#started = this.#isReady = true
    this.#ready.resolve()
  }

  #beat(socket: SocketLike | null): void {
    this.#acked = false
    const timestamp = Date.now()
    this.#write({ id: crypto.randomUUID(), type: "hub:heartbeat", pattern: "tell", payload: { timestamp } })
    this.#overdue = setTimeout(() => {
      if (socket && !this.#acked) this.#lose(socket, lost("the hub does not answer"))
    }, this.#options.timeouts.heartbeat)
  }

  /** This socket is no more, whoever noticed it first. */
  #lose(socket: SocketLike, error: HubError): void {
    if (socket !== this.#socket) return
    this.#socket = null
    clearInterval(this.#beating)
    clearTimeout(this.#overdue)
    socket.close()
    for (const ask of this.#asks.values()) if (ask.urgent) ask.reject(error)
    if (this.#ended) return
    const said = this.#goodbye.reason
    const reason = said !== undefined && FINAL.has(said) ? said : error.code
    const hopeless = !this.#started && (this.#failures + 1 >= FIRST_TRIES || !error.retryable)
    if (FINAL.has(reason) || hopeless) {
      this.#end(reason === error.code ? error : new HubError(reason, `the hub ended the session: ${reason}`))
      return
    }
    if (this.#isReady) [this.#isReady, this.#ready] = [false, settled()]
    const WebSocket = this.#WebSocket as SocketMaker
    this.#retrying = setTimeout(() => this.#open(WebSocket), this.#pause(error))
  }

  /** What the hub has asked for; else longer each time, and never at once with everybody else. */
  #pause(error: HubError): number {
    const { reconnectAfter } = this.#goodbye
    if (reconnectAfter !== undefined && Number.isFinite(reconnectAfter)) return reconnectAfter
    const { first, max } = this.#options.reconnect
    const ceiling = Math.min(max, first * 2 ** Math.min(this.#failures, 30))
    this.#failures += 1
    const retryAfter = Number(error.details["retryAfter"] ?? 0)
    return ceiling * Math.random() + (Number.isFinite(retryAfter) ? retryAfter : 0)
  }

  #end(error: HubError): void {
    this.#ended = error
    clearTimeout(this.#retrying)
    for (const ask of this.#asks.values()) ask.reject(error)
    this.#ready.reject(error)
    this.#isReady = false
    if (this.#socket) this.#lose(this.#socket, error)
    this.#options.ended(error)
  }

  // -- single messages

  #take(message: Message): void {
    if (!message.type.startsWith("hub:")) {
      this.#options.deliver(message)
    } else if (message.type === "hub:heartbeat_ack") {
      this.#acked = true
    } else if (!this.#answers(message)) {
      if (message.type === "hub:disconnect") this.#goodbye = (message.payload ?? {}) as Goodbye
      this.#options.notice(message)
    }
  }

  #answers(message: Message): boolean {
    const ask = message.correlationId === null ? undefined : this.#asks.get(message.correlationId)
    if (!ask) return false
    if (message.type === "hub:broadcast_progress") return true
    if (message.type === "hub:reply") {
      const { final, data } = message.payload as { final?: boolean; data?: unknown }
      if (final === false) {
        ask.onPart?.(data)
        return true
      }
    }
    const error = errorOf(message)
    if (error) ask.reject(error)
    else ask.resolve(message)
    return true
  }

  /** Whether there was a connection to write to. */
  #write({ id, from, type, payload, pattern, correlationId, metadata, ttl }: Request): boolean {
    const socket = this.#socket
    if (socket?.readyState !== OPEN) return false
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

/** Where a token comes from may fail in its own way. */
function asHubError(error: unknown): HubError {
  if (error instanceof HubError) return error
  return new HubError("connect_failed", String(error), { cause: error })
}
