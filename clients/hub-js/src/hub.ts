// Everything an actor does at the hub.
import { HubError } from "./errors.js"
import { Inbox } from "./inbox.js"
import { Session, socketUrl } from "./session.js"
import { settled } from "./settled.js"
import type {
  Ack,
  Actor,
  AskOptions,
  Broadcast,
  BroadcastOptions,
  Committed,
  DiscoverOptions,
  HubOptions,
  MailboxPage,
  Message,
  Place,
  Presence,
  Published,
  PublishOptions,
  ReadOptions,
  Reconnect,
  RegisterOptions,
  Registration,
  RequestOptions,
  SendOptions,
  SubscribeOptions,
  Subscription,
  Timeouts,
} from "./types.js"
import { Watching } from "./watching.js"
import type { Look, Told, Watched } from "./watching.js"

const TIMEOUTS: Timeouts = { connect: 5000, register: 5000, heartbeat: 10_000, ask: 30_000 }
const RECONNECT: Reconnect = { first: 1000, max: 30_000 }
const REGISTER_TRIES = 3
const TTL_S = 300
const INBOX_MAX = 10_000
const EARLY_MAX = 10_000

type Timer = ReturnType<typeof setTimeout>
type Registering = RegisterOptions & { actorAddress: string; ttlSeconds: number }
type Following = SubscribeOptions & { topic: string }

interface Page {
  actors: Actor[]
  hasMore: boolean
  cursor: string | null
}

/** The answer of an actor, as it is sent. */
interface Reply {
  ok?: boolean
  data?: unknown
  error?: { code?: string; message?: string }
  final?: boolean
}

interface Notice {
  targets?: string[]
  actorAddress?: string
}

/** An actor's place at the hub. `connect` it first, and `close` it in the end. */
export class Hub {
  readonly #session: Session
  readonly #place: HubOptions
  readonly #inbox: Inbox
  readonly #held = new Map<string, { payload: Registering; timer: Timer }>()
  readonly #followed = new Map<string, { payload: Following; id: string }>()
  readonly #watches = new Set<Watching>()
  /** By their ids in the current session. */
  readonly #watched = new Map<string, Watching>()
  readonly #unwatching = new Set<string>()
  /** How many watches have no id yet. Meanwhile, messages with unknown ids wait. */
  #opening = 0
  #early: Told[] = []
  #paused = new Set<string>()
  #pausedAll = false
  #resumed = settled()
  readonly #timeouts: Timeouts

  constructor(base: string | URL, options: HubOptions = {}) {
    this.#timeouts = { ...TIMEOUTS, ...options.timeouts }
    this.#place = options
    this.#inbox = new Inbox(options.inboxMax ?? INBOX_MAX)
    this.#session = new Session({
      url: socketUrl(base),
      address: options.address ?? `@(browser/${crypto.randomUUID()})`,
      token: options.token,
      capabilities: options.capabilities ?? [],
      timeouts: this.#timeouts,
      reconnect: { ...RECONNECT, ...options.reconnect },
      WebSocket: options.WebSocket,
      deliver: (message) => this.#deliver(message),
      notice: (message) => this.#noticed(message),
      connected: (resumed) => this.#connected(resumed),
      restore: () => this.#restore(),
      ended: (error) => this.#end(error),
    })
  }

  // -- the session

  /** Who the hub says we are. */
  get identity(): string {
    return this.#session.identity
  }

  get sessionId(): string | null {
    return this.#session.welcome?.sessionId ?? null
  }

  /** Whether the session is the one from before the last lost connection. */
  get resumed(): boolean {
    return this.#session.welcome?.resumed ?? false
  }

  async connect(): Promise<void> {
    await this.#session.start()
  }

  async close(): Promise<void> {
    for (const held of this.#held.values()) clearTimeout(held.timer)
    await this.#session.stop()
  }

  /** Lose the connection on purpose, to see what happens. */
  drop(): void {
    this.#session.drop()
  }

  /** Any message of the protocol that is answered, for what has no method here. */
  request(type: string, payload?: unknown, { metadata, timeoutMs }: RequestOptions = {}): Promise<Message> {
    return this.#session.ask({ type, payload, metadata }, { timeoutMs })
  }

  /** Go on under a new token. Resolves to when it expires, if it does. */
  async refreshToken(token?: string): Promise<number | null> {
    const known = this.#place.token
    const authToken = token ?? (typeof known === "function" ? await known() : known)
    const metadata = { authToken, nonce: crypto.randomUUID() }
    const refresh = { type: "hub:refresh_token", metadata }
    const answer = await this.#session.ask<{ tokenExpiresAt: number | null }>(refresh)
    return answer.payload.tokenExpiresAt
  }

  // -- addresses

  /** Take an address, and keep it: it is renewed, and taken again by every new session. */
  register(address?: string, options: RegisterOptions = {}): Promise<Registration> {
    const { capabilities = ["actor"], ttlSeconds = TTL_S, metadata = {}, ...rest } = options
    return this.#register({ actorAddress: address ?? this.identity, capabilities, metadata, ttlSeconds, ...rest })
  }

  async unregister(address: string): Promise<void> {
    this.#letGo(address)
    await this.#session.ask({ type: "hub:unregister", payload: { actorAddress: address } })
    this.#letGo(address) // a new session may have restored it meanwhile
  }

  /** All actors that match, sorted by address, page by page as needed. */
  discover(pattern = "*", options: DiscoverOptions = {}): AsyncGenerator<Actor, void, undefined> {
    return this.#discover({ pattern, ...options })
  }

  async *#discover(query: Watched & DiscoverOptions, urgent = false): AsyncGenerator<Actor, void, undefined> {
    let cursor: string | null = null
    do {
      const payload: unknown = { limit: 100, ...query, cursor }
      const answer: Message<Page> = await this.#session.ask({ type: "hub:discover", payload }, { urgent })
      const page = answer.payload
      yield* page.actors
      cursor = page.hasMore ? page.cursor : null
    } while (cursor !== null)
  }

  /** Who is there, and from then on who comes, goes or changes. It goes on over lost sessions. */
  async *watch(pattern = "*", options: { capability?: string } = {}): AsyncGenerator<Presence, void, undefined> {
    const watching = new Watching({ pattern, ...options })
    try {
      await this.#watch(watching)
      for (let event = await watching.next(); event !== null; event = await watching.next()) yield event
    } finally {
      this.#endWatch(watching)
      await this.#unwatch(watching.id)
    }
  }

  // -- messages

  /** Tell somebody something. With `ack` it resolves when the message has come so far. */
  async send(to: string, type: string, data: unknown = null, options: SendOptions = {}): Promise<Ack> {
    const { ack, sender, durable, ttl, metadata, correlationId, timeoutMs } = options
    await this.#untilOpen(to)
    const payload = { to, type, data, ack, durable }
    const request = { type: "hub:send", payload, metadata, ttl, correlationId, from: sender }
    if (ack === undefined) return { messageId: await this.#session.tell(request), status: "sent" }
    return (await this.#session.ask<Ack>(request, { timeoutMs })).payload
  }

  /** Ask somebody something, and wait for the reply. `onPart` gets what comes before the last one. */
  async ask<Data = unknown>(to: string, type: string, data: unknown = null, options: AskOptions<Data> = {}): Promise<Data> {
    const { sender, metadata, timeoutMs = this.#timeouts.ask, onPart } = options
    await this.#untilOpen(to)
    const payload = { to, type, data, expectReply: true }
    const request = { type: "hub:send", payload, metadata, ttl: timeoutMs, from: sender }
    const { payload: reply, from } = await this.#session.ask<Reply, Data>(request, { timeoutMs, onPart })
    if (reply.ok !== false) return reply.data as Data
    const { code = "failed", message = "the actor failed", ...details } = reply.error ?? {}
    throw new HubError(code, message, { ...details, from })
  }

  /** Answer a message that wants a reply. All but the last answer have `final: false`. */
  async reply(message: Message, data: unknown = null, { final = true }: { final?: boolean } = {}): Promise<void> {
    await this.#reply(message, { ok: true, data, final })
  }

  /** Say that it cannot be answered. The asker gets an error with this code. */
  async replyError(message: Message, code: string, text: string): Promise<void> {
    await this.#reply(message, { ok: false, error: { code, message: text }, final: true })
  }

  /** Send to everybody who is registered now, or to those who match. */
  async broadcast(type: string, data: unknown = null, options: BroadcastOptions = {}): Promise<Broadcast> {
    const { pattern, capability, excludeSelf = true, timeoutMs } = options
    const payload = { type, data, excludeSelf, pattern }
    const metadata = capability === undefined ? {} : { targetCapability: capability }
    const request = { type: "hub:broadcast", pattern: "tell" as const, payload, metadata }
    return (await this.#session.ask<Broadcast>(request, { timeoutMs })).payload
  }

  /** What comes for any address or subscription of ours, for as long as the client is open. */
  async *messages(): AsyncGenerator<Message, void, undefined> {
    for (let message = await this.nextMessage(); message !== null; message = await this.nextMessage()) {
      yield message
    }
  }

  /** The next of them; null if none came in time, or none will come any more. */
  nextMessage(timeoutMs?: number): Promise<Message | null> {
    return this.#inbox.take(timeoutMs)
  }

  // -- topics

  /** Get what is published to a topic. `+` stands for one segment, a last `#` for all the rest. */
  async subscribe(topic: string, options: SubscribeOptions = {}): Promise<Subscription> {
    const payload = { topic, ...options }
    const { payload: subscription } = await this.#session.ask<Subscription>({ type: "hub:subscribe", payload })
    this.#followed.set(subscription.subscriptionId, { payload, id: subscription.subscriptionId })
    return subscription
  }

  async unsubscribe({ subscriptionId }: Pick<Subscription, "subscriptionId">): Promise<void> {
    // A new session has given it another id.
    const id = this.#followed.get(subscriptionId)?.id ?? subscriptionId
    this.#followed.delete(subscriptionId)
    await this.#unsubscribe(id)
  }

  async publish(topic: string, type: string, data: unknown = null, options: PublishOptions = {}): Promise<Published> {
    const { durable, metadata, timeoutMs } = options
    const request = { type: "hub:publish", payload: { topic, type, data, durable }, metadata }
    return (await this.#session.ask<Published>(request, { timeoutMs })).payload
  }

  // -- mailboxes

  /** A page of what is kept for an address. Reading moves nothing. */
  async readMailbox(address?: string, options: ReadOptions = {}): Promise<MailboxPage> {
    const { offset = "committed", limit = 100, ...rest } = options
    const payload = { actorAddress: address ?? this.identity, offset, limit, ...rest }
    return (await this.#session.ask<MailboxPage>({ type: "hub:mailbox_read", payload })).payload
  }

  /** A kept message was processed, and what was before it, but in a durable group: there it stands alone. */
  async commit(message: Message): Promise<Committed | null> {
    const mailbox = message.metadata.mailbox
    if (!mailbox) return null
    const payload = { actorAddress: message.to, ...mailbox }
    return (await this.#session.ask<Committed>({ type: "hub:mailbox_commit", payload })).payload
  }

  /** These kept messages were processed, and nothing is said of others: for members of durable groups. */
  async commitEach(messages: Message[]): Promise<void> {
    const places = new Map<string, Omit<Place, "offset"> & { actorAddress: string; offsets: string[] }>()
    for (const { to, metadata } of messages) {
      if (!metadata.mailbox) continue
      const { offset, ...place } = metadata.mailbox
      const key = JSON.stringify([to, place])
      const known = places.get(key)
      if (known) known.offsets.push(offset)
      else places.set(key, { actorAddress: to, ...place, offsets: [offset] })
    }
    for (const payload of places.values()) await this.#session.ask({ type: "hub:mailbox_commit", payload })
  }

  // -- inside

  async #unsubscribe(subscriptionId: string): Promise<void> {
    await this.#session.ask({ type: "hub:unsubscribe", payload: { subscriptionId } })
  }

  async #watch(watching: Watching, urgent = false): Promise<void> {
    const payload = { action: "watch", ...watching.query }
    let look: Look
    this.#opening += 1
    try {
      look = (await this.#session.ask<Look>({ type: "hub:presence", payload }, { urgent })).payload
      if (watching.ended) {
        void this.#unwatch(look.watchId)
        return
      }
      watching.begin(look)
      this.#watches.add(watching)
      this.#watched.set(watching.id, watching)
    } finally {
      this.#opening -= 1
      const early = this.#early
      this.#early = []
      for (const told of early) this.#present(told)
    }
    await this.#look(watching, look, urgent)
  }

  /** Everybody who was there at an offset; what came after it is told after it. */
  async #look(watching: Watching, look: Look, urgent = false): Promise<void> {
    let found = look.actors
    try {
      if (look.hasMore) {
        found = []
        const query = { ...watching.query, asOf: look.offset }
        for await (const actor of this.#discover(query, urgent)) found.push(actor)
      }
    } catch (error) {
      if (watching.isLoading(look)) throw error
    }
    if (watching.isLoading(look)) watching.look(found)
  }

  #present(told: Told): void {
    const watching = this.#watched.get(told.watchId)
    if (!told.actors && (told.event as string) === "unwatched") {
      return // the second answer to a request that was sent twice
    } else if (!watching && this.#opening > 0) {
      if (this.#early.length < EARLY_MAX) this.#early.push(told)
    } else if (!watching) {
      // The answer with this id was lost, or the watch was ended. It counts towards the limit of the session,
      // so it is removed even before the session is ready.
      void this.#unwatch(told.watchId, true)
    } else if (told.actors) {
      // Events were lost, so the hub sends a new snapshot.
      watching.begin(told)
      this.#look(watching, told).catch((error: Error) => {
        this.#endWatch(watching, error)
        void this.#unwatch(told.watchId)
      })
    } else {
      watching.take(told)
    }
  }

  #endWatch(watching: Watching, error: Error | null = null): void {
    this.#watches.delete(watching)
    this.#watched.delete(watching.id)
    if (!watching.ended) watching.end(error)
  }

  async #unwatch(watchId: string, urgent = false): Promise<void> {
    if (watchId === "" || this.#unwatching.has(watchId)) return
    this.#unwatching.add(watchId)
    const payload = { action: "unwatch", watchId }
    // If it fails, the watch ends with the session.
    await this.#session.ask({ type: "hub:presence", payload }, { urgent }).catch(() => {})
    this.#unwatching.delete(watchId)
  }

  async #reply(message: Message, payload: Reply): Promise<void> {
    await this.#session.tell({ type: "hub:reply", payload, correlationId: message.id, from: message.to })
  }

  async #register(payload: Registering, urgent = false): Promise<Registration> {
    for (let tries = 1; ; tries += 1) {
      try {
        const request = { type: "hub:register", payload }
        const answer = await this.#session.ask<Registration>(request, { timeoutMs: this.#timeouts.register, urgent })
        this.#hold(payload, answer.payload)
        return answer.payload
      } catch (error) {
        // Registering twice is registering once.
        if (!hasCode(error, "timeout") || tries === REGISTER_TRIES) throw error
      }
    }
  }

  /** Renewed after half of its time: one renewal may be lost, and the address is still ours. */
  #hold(payload: Registering, registration: Registration, afterMs = renewalMs(payload, registration)): void {
    clearTimeout(this.#held.get(registration.actorAddress)?.timer)
    const timer = setTimeout(() => void this.#renew(payload, registration), afterMs)
    unref(timer)
    this.#held.set(registration.actorAddress, { payload, timer })
  }

  async #renew(payload: Registering, registration: Registration): Promise<void> {
    this.#hold(payload, registration, 5000)
    const renewal = { type: "hub:renew", payload: { renewalToken: registration.renewalToken } }
    try {
      const answer = await this.#session.ask<Registration>(renewal)
      if (this.#held.has(registration.actorAddress)) this.#hold(payload, answer.payload)
    } catch (error) {
      const isHeld = this.#held.has(registration.actorAddress)
      if (isHeld && hasCode(error, "invalid_token")) await this.#register(payload).catch(() => {})
    }
  }

  #letGo(address: string): void {
    clearTimeout(this.#held.get(address)?.timer)
    this.#held.delete(address)
  }

  /** The hub keeps no pauses of a lost connection, and no watches of a lost session. */
  #connected(resumed: boolean): void {
    this.#resume(undefined)
    if (resumed) return
    this.#watched.clear()
    for (const watching of this.#watches) watching.id = ""
  }

  /** A new session knows nothing of the one before. */
  async #restore(): Promise<void> {
    for (const [address, { payload }] of [...this.#held]) {
      await this.#again(
        () => this.#register(payload, true),
        () => this.#letGo(address),
      )
    }
    for (const [known, followed] of [...this.#followed]) {
      const { from: _, ...payload } = followed.payload
      await this.#again(
        async () => {
          const subscribe = { type: "hub:subscribe", payload }
          const answer = await this.#session.ask<Subscription>(subscribe, { urgent: true })
          followed.id = answer.payload.subscriptionId
          if (this.#followed.get(known) !== followed) this.#unsubscribe(followed.id).catch(() => {})
        },
        () => this.#followed.delete(known),
      )
    }
    // A session that was lost in the middle of this still has the watches with an id.
    for (const watching of [...this.#watches].filter(({ id }) => id === "")) {
      await this.#again(
        () => this.#watch(watching, true),
        (error) => this.#endWatch(watching, error),
      )
    }
  }

  async #again(work: () => Promise<unknown>, giveUp: (error: HubError) => void): Promise<void> {
    try {
      await work()
    } catch (error) {
      if (!(error instanceof HubError) || error.retryable) throw error
      giveUp(error)
    }
  }

  #deliver(message: Message): void {
    if (this.#inbox.put(message)) return
    this.#session.fail(new HubError("inbox_full", "too many messages have come that nobody took"))
  }

  #noticed(message: Message): void {
    const { type } = message
    const { targets, actorAddress } = (message.payload ?? {}) as Notice
    if (type === "hub:pause") {
      if (targets) for (const target of targets) this.#paused.add(target)
      else this.#pausedAll = true
    } else if (type === "hub:resume") {
      this.#resume(targets)
    } else if (type === "hub:presence") {
      this.#present(message.payload as Told)
    } else if (type === "hub:unregistered") {
      if (actorAddress !== undefined) this.#letGo(actorAddress)
    } else if (type === "hub:token_expiring" && typeof this.#place.token === "function") {
      this.refreshToken().catch(() => {})
    }
    this.#place.onNotice?.(message)
  }

  #resume(targets: string[] | undefined): void {
    if (targets) for (const target of targets) this.#paused.delete(target)
    else [this.#paused, this.#pausedAll] = [new Set(), false]
    this.#resumed.resolve()
    this.#resumed = settled()
  }

  /** The hub asks for a pause when a recipient cannot keep up. */
  async #untilOpen(target: string): Promise<void> {
    while (this.#pausedAll || this.#paused.has(target)) await this.#resumed.promise
  }

  #end(error: HubError): void {
    for (const held of this.#held.values()) clearTimeout(held.timer)
    this.#inbox.end()
    for (const watching of this.#watches) watching.end()
    this.#resume(undefined)
    this.#place.onEnd?.(error)
  }
}

/** Half of the time that was given, which the hub bounds; a hub that does not tell gave what was asked for. */
function renewalMs(payload: Registering, registration: Registration): number {
  return (registration.ttlSeconds ?? payload.ttlSeconds) * 500
}

function hasCode(error: unknown, code: string): boolean {
  return error instanceof HubError && error.code === code
}

/** Timers of Node keep a program alive; those of browsers are numbers. */
function unref(timer: Timer): void {
  const known: unknown = timer
  if (typeof known === "object" && known !== null && "unref" in known && typeof known.unref === "function") known.unref()
}
