// Promises that are settled from outside.

export interface Settled<Value = void> {
  promise: Promise<Value>
  resolve: (value: Value) => void
  reject: (error: Error) => void
}

/** Nobody has to look at it: one that fails unseen is no unhandled rejection. */
export function settled<Value = void>(): Settled<Value> {
  let resolve!: (value: Value) => void
  let reject!: (error: Error) => void
  const promise = new Promise<Value>((yes, no) => {
    resolve = yes
    reject = no
  })
  promise.catch(() => {})
  return { promise, resolve, reject }
}
