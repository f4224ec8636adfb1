/** `code` is the thing to test for. `retryable` says that the same may go well later. */
export class HubError extends Error {
  constructor(code: string, message: string, details?: Record<string, unknown>, retryable?: boolean)
  readonly code: string
  readonly details: Record<string, unknown>
  readonly retryable: boolean
}

export type Runtime = "browser" | "cloudflare" | "local" | "seag" | "beam"

/** An address of the hub as a runtime writes it. */
export function toRuntime(address: string, runtime: Runtime): string
/** The hub's address for one that a runtime wrote. */
export function fromRuntime(text: string, runtime: Runtime): string

/** One message, as it comes over the wire. `from` was verified by the hub. */
export interface Message<Data = unknown> {
  id: string
  from: string
  to: string
  type: string
  payload: Data
  pattern: "tell" | "ask"
  correlationId: string | null
  timestamp: number
  metadata: {
    topic?: string
    mailbox?: { stream: string; offset: string; subscriptionId?: string }
    redelivered?: boolean
    [name: string]: unknown
  }
  ttl: number | null
  signature: string | null
}

export interface HubOptions {
  /** Who we are, where no token says so. */
  address?: string
  /** A token, or where to get one: it is asked again before the old one expires. */
  token?: string | (() => string | Promise<string>)
  capabilities?: string[]
  /** In milliseconds: 5000, 5000, 10000 and 30000 if not given. */
  timeouts?: { connect?: number; register?: number; heartbeat?: number; ask?: number }
  /** The first pause before reconnecting and the longest, in milliseconds. */
  reconnect?: { first?: number; max?: number }
  /** For runtimes without a `WebSocket` of their own. */
  WebSocket?: unknown
  /** How many messages may wait to be taken before the client gives up: 10000. */
  inboxMax?: number
  /** What the hub says by itself: pauses, dropped messages, undeliverable ones. */
  onNotice?: (message: Message) => void
  /** The end, for good. A connection that is lost and comes back is none. */
  onEnd?: (error: HubError) => void
}

export interface RegisterOptions {
  capabilities?: string[]
  metadata?: Record<string, unknown>
  ttlSeconds?: number
  durable?: boolean
  commit?: "auto" | "manual"
  push?: boolean
  maxInFlight?: number
  ackTimeout?: number
  maxDeliver?: number
}

export interface Registration {
  actorAddress: string
  expiresAt: number
  renewalToken: string
  version: number
  durable: boolean
}

export interface Actor {
  address: string
  capabilities: string[]
  metadata: Record<string, unknown>
  expiresAt: number
  version: number
  online: boolean
  durable: boolean
}

/** Somebody joined, left, expired or was updated. Those who are there when a watch begins join it. */
export interface Presence {
  event: "joined" | "left" | "expired" | "updated"
  actorAddress: string
  capabilities: string[]
  version: number
  /** Milliseconds since 1970; null if it was seen by looking. */
  at: number | null
}

export interface Ack {
  messageId: string
  status: "sent" | "delivered" | "queued" | "accepted" | "processed"
  level?: string
  stream?: string | null
  offset?: string | null
  duplicate?: boolean
}

export interface Subscription {
  topic: string
  subscriptionId: string
  durable: boolean
  group: string | null
  offset: string | null
}

export interface Published {
  topic: string
  subscriberCount: number
  queuedCount: number
  stream: string | null
  offset: string | null
}

export interface Broadcast {
  messageId: string
  deliveredCount: number
  queuedCount: number
  failedCount: number
  total: number
}

export interface MailboxPage {
  actorAddress: string
  stream: string
  messages: { offset: string; appendTime: string; message: Message }[]
  nextOffset: string
  committed: string
  upToDate: boolean
  lag: number
}

/** An actor's place at the hub. `connect` it first, and `close` it in the end. */
export class Hub {
  constructor(base: string | URL, options?: HubOptions)
  /** Who the hub says we are. */
  readonly identity: string
  readonly sessionId: string | null
  /** Whether the session is the one from before the last lost connection. */
  readonly resumed: boolean

  connect(): Promise<void>
  close(): Promise<void>
  /** Lose the connection on purpose, to see what happens. */
  drop(): void
  /** Any message of the protocol that is answered. */
  request(
    type: string,
    payload?: unknown,
    options?: { metadata?: Record<string, unknown>; timeoutMs?: number },
  ): Promise<Message>
  /** Go on under a new token. Resolves to when it expires. */
  refreshToken(token?: string): Promise<number>

  register(address?: string, options?: RegisterOptions): Promise<Registration>
  unregister(address: string): Promise<void>
  discover(
    pattern?: string,
    options?: { capabilities?: string[]; metadata?: Record<string, unknown>; limit?: number; asOf?: number | string },
  ): AsyncGenerator<Actor>

  watch(pattern?: string, options?: { capability?: string }): AsyncGenerator<Presence>

  send(
    to: string,
    type: string,
    data?: unknown,
    options?: {
      ack?: "delivered" | "accepted" | "processed"
      sender?: string
      durable?: boolean
      ttl?: number
      correlationId?: string
      metadata?: Record<string, unknown>
      timeoutMs?: number
    },
  ): Promise<Ack>
  ask<Data = unknown>(
    to: string,
    type: string,
    data?: unknown,
    options?: {
      sender?: string
      metadata?: Record<string, unknown>
      timeoutMs?: number
      onPart?: (data: Data) => void
    },
  ): Promise<Data>
  reply(message: Message, data?: unknown, options?: { final?: boolean }): Promise<void>
  replyError(message: Message, code: string, text: string): Promise<void>
  broadcast(
    type: string,
    data?: unknown,
    options?: { pattern?: string; capability?: string; excludeSelf?: boolean; timeoutMs?: number },
  ): Promise<Broadcast>
  messages(): AsyncGenerator<Message>
  nextMessage(timeoutMs?: number): Promise<Message | null>

  subscribe(
    topic: string,
    options?: { durable?: boolean; group?: string; name?: string; from?: string | number },
  ): Promise<Subscription>
  unsubscribe(subscription: Subscription): Promise<void>
  publish(
    topic: string,
    type: string,
    data?: unknown,
    options?: { durable?: boolean; metadata?: Record<string, unknown>; timeoutMs?: number },
  ): Promise<Published>

  readMailbox(
    address?: string,
    options?: { offset?: string; since?: number | string; limit?: number; stream?: string },
  ): Promise<MailboxPage>
  commit(message: Message): Promise<{ committed: string; lag: number } | null>
  commitEach(messages: Message[]): Promise<void>
}
