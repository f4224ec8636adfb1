// Another of three actors: asks the worker for one square after the other. Runs in a browser, and in node as it is.
import { Hub } from "../../clients/hub-js/dist/index.js"

const WORKER = "@(demo/worker)"

/** Asks `count` questions; `show` gets a line for each answer. */
export async function converse(base, show, { count = Infinity, pauseMs = 1000, reconnect } = {}) {
  const hub = new Hub(base, { address: "@(demo/page)", reconnect })
  await hub.connect()
  await hub.register()
  for (let n = 1; n <= count; n += 1) {
    // The question waits in the worker's mailbox while one of us, or the server, is away.
    const { square } = await hub.ask(WORKER, "square", { n }, { timeoutMs: 120_000 })
    show(`${n} squared is ${square}`)
    await new Promise((resolve) => setTimeout(resolve, pauseMs))
  }
  await hub.close()
}
