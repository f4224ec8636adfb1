// What goes in and out: the options of the client, and what the hub answers.
import type { HubError } from "./errors.js"

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
  metadata: Metadata
  ttl: number | null
  signature: string | null
}

export interface Metadata {
  topic?: string
  mailbox?: Place
  redelivered?: boolean
  [name: string]: unknown
}

/** Where a kept message is. */
export interface Place {
  stream: string
  offset: string
  subscriptionId?: string
}

/** As much of a `WebSocket` as the client uses. Events are typed differently by everybody who has one. */
export interface SocketLike {
  readonly readyState: number
  onopen: ((event: any) => void) | null
  onmessage: ((event: any) => void) | null
  onclose: ((event: any) => void) | null
  onerror: ((event: any) => void) | null
  send(text: string): void
  close(): void
}

export type SocketMaker = new (url: string, protocols: string[]) => SocketLike

/** A token, or where to get one: it is asked again before the old one expires. */
export type Token = string | (() => string | Promise<string>)

/** In milliseconds. */
export interface Timeouts {
  connect: number
  register: number
  heartbeat: number
  ask: number
}

/** The first pause before reconnecting and the longest, in milliseconds. */
export interface Reconnect {
  first: number
  max: number
}

export interface HubOptions {
  /** Who we are, where no token says so. */
  address?: string
  token?: Token
  capabilities?: string[]
  /** 5000, 5000, 10000 and 30000 ms if not given. */
  timeouts?: Partial<Timeouts>
  /** From 1000 to 30000 ms if not given. */
  reconnect?: Partial<Reconnect>
  /** For runtimes without a `WebSocket` of their own. Node before 22 uses the package `ws` if it is installed. */
  WebSocket?: SocketMaker
  /** How many messages may wait to be taken before the client gives up: 10000. */
  inboxMax?: number
  /** What the hub says by itself: pauses, dropped messages, undeliverable ones. */
  onNotice?: (message: Message) => void
  /** The end, for good. A connection that is lost and comes back is none. */
  onEnd?: (error: HubError) => void
}

export interface RequestOptions {
  metadata?: Record<string, unknown>
  timeoutMs?: number
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
  /** What was given, which may differ from what was asked for. */
  ttlSeconds?: number
}

export interface Actor {
  address: string
  capabilities: string[]
  metadata: Record<string, unknown>
  expiresAt: number
  /** The session that has it; empty if it is durable and its actor has left. */
  connectionId: string
  version: number
  online: boolean
  durable: boolean
}

export interface DiscoverOptions {
  capabilities?: string[]
  metadata?: Record<string, unknown>
  limit?: number
  asOf?: number | string
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

export interface SendOptions extends RequestOptions {
  /** Resolve when the message has come so far. */
  ack?: "delivered" | "accepted" | "processed"
  /** Another of our addresses. */
  sender?: string
  durable?: boolean
  ttl?: number
  correlationId?: string
}

export interface AskOptions<Data = unknown> extends RequestOptions {
  sender?: string
  /** Gets what comes before the last reply. */
  onPart?: (data: Data) => void
}

export interface Ack {
  messageId: string
  status: "sent" | "delivered" | "queued" | "accepted" | "processed"
  level?: string
  stream?: string | null
  offset?: string | null
  duplicate?: boolean
}

export interface BroadcastOptions {
  pattern?: string
  capability?: string
  excludeSelf?: boolean
  timeoutMs?: number
}

export interface Broadcast {
  messageId: string
  deliveredCount: number
  queuedCount: number
  failedCount: number
  total: number
}

export interface SubscribeOptions {
  durable?: boolean
  group?: string
  name?: string
  from?: string | number
}

export interface Subscription {
  topic: string
  subscriptionId: string
  durable: boolean
  group: string | null
  offset: string | null
}

export interface PublishOptions extends RequestOptions {
  durable?: boolean
}

export interface Published {
  topic: string
  subscriberCount: number
  queuedCount: number
  stream: string | null
  offset: string | null
}

export interface ReadOptions {
  offset?: string
  since?: number | string
  limit?: number
  stream?: string
}

export interface MailboxPage {
  actorAddress: string
  stream: string
  messages: { offset: string; appendTime: string; message: Message }[]
  nextOffset: string
  /** Null, like `lag`, where there is no mailbox. */
  committed: string | null
  upToDate: boolean
  lag: number | null
}

export interface Committed {
  committed: string
  lag: number
}
