// A client of the Tailrace hub, for browsers and for Node 22 and later. Plain modules, nothing to build.
export { fromRuntime, toRuntime } from "./addresses.js"
export { HubError } from "./errors.js"
export { Hub } from "./hub.js"
