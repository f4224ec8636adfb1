// The one error of this client: what the hub said, or what happened instead of an answer.

/** `code` is the thing to test for. `retryable` says that the same may go well later. */
export class HubError extends Error {
  constructor(code, message, details = {}, retryable = false) {
    super(message)
    this.name = "HubError"
    this.code = code
    this.details = details
    this.retryable = retryable
  }
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
export function errorOf(message) {
  if (!ERRORS.has(message.type)) return null
  const { code, message: text, retryable, details, resolution, ...members } = message.payload ?? {}
  const known = code ?? message.type.slice("hub:".length)
  return new HubError(known, text ?? known, { ...members, ...details, resolution }, retryable === true)
}

export const timedOut = (what, ms) => new HubError("timeout", `${what} was not answered in ${ms} ms`, {}, true)
export const lost = (why) => new HubError("connection_lost", why, {}, true)
