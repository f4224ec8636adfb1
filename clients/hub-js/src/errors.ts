// The one error of this client: what the hub said, or what happened instead of an answer.
import type { Message } from "./types.js"

/** `code` is the thing to test for. `retryable` says that the same may go well later. */
export class HubError extends Error {
  override readonly name = "HubError"

  constructor(
    readonly code: string,
    message: string,
    readonly details: Record<string, unknown> = {},
    readonly retryable: boolean = false,
  ) {
    super(message)
  }
}

/** An error as the hub tells it; the typed forms have members of their own beside these. */
interface Told {
  code?: string
  message?: string
  retryable?: boolean
  resolution?: string
  details?: Record<string, unknown>
}

const ERRORS = new Set([
  "hub:error",
  "hub:unknown_actor",
  "hub:unauthorized",
  "hub:rate_limited",
  "hub:version_mismatch",
  "hub:message_too_large",
])

/** The error that a message stands for, in the generic or in a typed form; null if it is none. */
export function errorOf(message: Message): HubError | null {
  if (!ERRORS.has(message.type)) return null
  const told = (message.payload ?? {}) as Told
  const { code, message: text, retryable, details, resolution, ...members } = told
  const known = code ?? message.type.slice("hub:".length)
  return new HubError(known, text ?? known, { ...members, ...details, resolution }, retryable === true)
}

export function timedOut(what: string, ms: number): HubError {
  return new HubError("timeout", `${what} was not answered in ${ms} ms`, {}, true)
}

export function lost(why: string): HubError {
  return new HubError("connection_lost", why, {}, true)
}
