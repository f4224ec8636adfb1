// Addresses as other runtimes write them, and back.
import { HubError } from "./errors.js"

export type Runtime = "browser" | "cloudflare" | "local" | "seag" | "beam"

// The first is what is written, all are understood.
const PREFIXES: Record<Runtime, readonly string[]> = {
  browser: ["local://"],
  cloudflare: ["remote://do/", "remote://worker/", "worker://", "do://"],
  beam: [""],
  local: [],
  seag: [],
}
const PATH = /^[A-Za-z0-9_.:~-]+(\/[A-Za-z0-9_.:~-]+){0,7}$/
const RESERVED = new Set([".", "..", "pk", "touch"])

/** The path of an address: `browser/w-1` of `@(browser/w-1)`. */
export function pathOf(address: string): string {
  const path = address.startsWith("@(") && address.endsWith(")") ? address.slice(2, -1) : ""
  const improper = path.split("/").some((segment) => RESERVED.has(segment) || segment.startsWith("_"))
  if (!PATH.test(path) || improper || address.length > 256) {
    throw new HubError("invalid_request", `not an address: ${address}`, { field: "address" })
  }
  return path
}

/** An address of the hub as a runtime writes it. */
export function toRuntime(address: string, runtime: Runtime): string {
  const path = pathOf(address)
  const [prefix] = PREFIXES[runtime]
  return prefix === undefined ? address : prefix + path
}

/** The hub's address for one that a runtime wrote. The hub's own form is understood everywhere. */
export function fromRuntime(text: string, runtime: Runtime): string {
  let address = text
  if (!text.startsWith("@(")) {
    const prefix = PREFIXES[runtime].find((known) => text.startsWith(known))
    if (prefix !== undefined) address = `@(${text.slice(prefix.length)})`
  }
  pathOf(address)
  return address
}
