// A client of the Tailrace hub, for browsers and for Node 22 and later.
export { fromRuntime, toRuntime } from "./addresses.js"
export type { Runtime } from "./addresses.js"
export { HubError } from "./errors.js"
export { Hub } from "./hub.js"
export type * from "./types.js"
